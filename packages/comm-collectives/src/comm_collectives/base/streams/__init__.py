"""Ordered streams of bytes between the ranks of a group, over which this package's own calls go.

May import: base, transport.
"""

from comm_collectives.base.streams.shared import ShmStreams as ShmStreams
from comm_collectives.base.streams.sockets import SocketStreams as SocketStreams
from comm_collectives.base.streams.streams import Streams as Streams
