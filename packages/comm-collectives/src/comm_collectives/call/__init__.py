"""The life of one call: the ranks compare their signatures, data moves, a failure is explained.

May import: base.
"""

from comm_collectives.call.calls import BACKWARD_OF as BACKWARD_OF
from comm_collectives.call.calls import Call as Call
from comm_collectives.call.counts import exchange_counts as exchange_counts
from comm_collectives.call.failures import classify as classify
from comm_collectives.call.failures import first_line as first_line
from comm_collectives.call.inline_payload import fits_page as fits_page
from comm_collectives.call.inline_payload import inline_rows as inline_rows
from comm_collectives.call.inline_payload import not_inline as not_inline
from comm_collectives.call.reports import awaited_backward as awaited_backward
from comm_collectives.call.waiting import wait_for as wait_for
