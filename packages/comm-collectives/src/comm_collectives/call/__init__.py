"""The life of one call: the ranks compare their signatures, data moves, a failure is explained.

May import: base.
"""

from comm_collectives.call.agreed import Agreed as Agreed
from comm_collectives.call.calls import BACKWARD_OF as BACKWARD_OF
from comm_collectives.call.calls import Call as Call
from comm_collectives.call.calls import Refusal as Refusal
from comm_collectives.call.checks import Checks as Checks
from comm_collectives.call.counts import pack_counts as pack_counts
from comm_collectives.call.counts import unpack_counts as unpack_counts
