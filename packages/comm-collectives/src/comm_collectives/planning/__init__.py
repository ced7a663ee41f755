"""Which route and payload to choose for MoE rows: counted bytes and a cost model, without torch.

May import: no other room.
"""

from comm_collectives.planning.plan_command import add_plan_arguments as add_plan_arguments
from comm_collectives.planning.plan_command import run_plan as run_plan
from comm_collectives.planning.wire_format import BLOCK_ELEMENTS as BLOCK_ELEMENTS
from comm_collectives.planning.wire_format import INDEX_BYTES as INDEX_BYTES
from comm_collectives.planning.wire_format import ROUTES as ROUTES
from comm_collectives.planning.wire_format import SCALE_BYTES as SCALE_BYTES
from comm_collectives.planning.wire_format import MessageLayout as MessageLayout
from comm_collectives.planning.wire_format import Movement as Movement
from comm_collectives.planning.wire_format import Route as Route
from comm_collectives.planning.wire_format import RowFormat as RowFormat
from comm_collectives.planning.wire_format import message_layout as message_layout
