"""What ranks tell each other ahead of data, and the data: frames over the streams of a group.

May import: base, transport, streams.
"""

from comm_collectives.call.frames.frames import Cargo as Cargo
from comm_collectives.call.frames.frames import Frames as Frames
from comm_collectives.call.frames.frames import Waiter as Waiter
from comm_collectives.call.frames.link import NO_SIGNATURE as NO_SIGNATURE
from comm_collectives.call.frames.link import Frame as Frame
from comm_collectives.call.frames.link import Kind as Kind
from comm_collectives.call.frames.link import Link as Link
from comm_collectives.call.frames.link import Notice as Notice
from comm_collectives.call.frames.memory import Pieces as Pieces
from comm_collectives.call.frames.memory import memory_of as memory_of
from comm_collectives.call.frames.memory import memory_of_each as memory_of_each
from comm_collectives.call.frames.memory import sizes_of as sizes_of
