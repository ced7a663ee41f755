"""What one message of rows holds, in bytes: executor and planner ask here, so they cannot differ.

May import: no other room.
"""

from comm_collectives.planning.wire.wire_format import BLOCK_ELEMENTS as BLOCK_ELEMENTS
from comm_collectives.planning.wire.wire_format import INDEX_BYTES as INDEX_BYTES
from comm_collectives.planning.wire.wire_format import MOVEMENTS as MOVEMENTS
from comm_collectives.planning.wire.wire_format import ROUTES as ROUTES
from comm_collectives.planning.wire.wire_format import SCALE_BYTES as SCALE_BYTES
from comm_collectives.planning.wire.wire_format import Movement as Movement
from comm_collectives.planning.wire.wire_format import Route as Route
from comm_collectives.planning.wire.wire_format import RowFormat as RowFormat
from comm_collectives.planning.wire.wire_format import check_sizes as check_sizes
from comm_collectives.planning.wire.wire_format import message_bytes as message_bytes
