"""One tensor, or a list of them, between two ranks; the order of other calls does not matter.

May import: base, call, collectives.
"""

from comm_collectives.p2p.devices import Pending as Pending
from comm_collectives.p2p.devices import launch_transfers as launch_transfers
from comm_collectives.p2p.send_recv import recv as recv
from comm_collectives.p2p.send_recv import send as send
from comm_collectives.p2p.tensors import SendHandle as SendHandle
from comm_collectives.p2p.tensors import expect_tensors as expect_tensors
from comm_collectives.p2p.tensors import isend_tensors as isend_tensors
from comm_collectives.p2p.tensors import recv_tensors as recv_tensors
