"""How bytes move between the ranks of a group, over torch or through shared memory.

May import: base.
"""

from comm_collectives.base.transport.clock import SYSTEM_CLOCK as SYSTEM_CLOCK
from comm_collectives.base.transport.clock import Clock as Clock
from comm_collectives.base.transport.header import TransferFlag as TransferFlag
from comm_collectives.base.transport.header import TransferHeader as TransferHeader
from comm_collectives.base.transport.scratch import Lease as Lease
from comm_collectives.base.transport.scratch import ScratchPool as ScratchPool
from comm_collectives.base.transport.shm_region import Region as Region
from comm_collectives.base.transport.transport import Pending as Pending
from comm_collectives.base.transport.transport import TorchTransport as TorchTransport
from comm_collectives.base.transport.transport import Transport as Transport
from comm_collectives.base.transport.transport import classify as classify
from comm_collectives.base.transport.transport import wait_for as wait_for
