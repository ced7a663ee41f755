"""The control exchange ahead of a call: a shared mailbox on one host, messages elsewhere.

May import: base, signature.
"""

from comm_collectives.call.control.exchange import ControlExchange as ControlExchange
from comm_collectives.call.control.exchange import Exchanged as Exchanged
from comm_collectives.call.control.exchange import MailboxExchange as MailboxExchange
from comm_collectives.call.control.exchange import Waiter as Waiter
from comm_collectives.call.control.exchange import WireExchange as WireExchange
from comm_collectives.call.control.inline_pages import PAGE_BYTES as PAGE_BYTES
from comm_collectives.call.control.inline_pages import InlinePages as InlinePages
from comm_collectives.call.control.mailbox import Arrival as Arrival
from comm_collectives.call.control.mailbox import SharedMailbox as SharedMailbox
