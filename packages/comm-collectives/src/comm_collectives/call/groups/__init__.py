"""What this rank knows of a process group, and the bytes that it hands to its backend.

May import: base, signature, agreement, frames.
"""

from comm_collectives.call.groups.groups import CustomGroup as CustomGroup
from comm_collectives.call.groups.groups import Group as Group
from comm_collectives.call.groups.groups import GroupState as GroupState
from comm_collectives.call.groups.groups import Ordered as Ordered
from comm_collectives.call.groups.groups import check_integer as check_integer
from comm_collectives.call.groups.groups import check_peer as check_peer
from comm_collectives.call.groups.groups import check_root as check_root
from comm_collectives.call.groups.groups import check_timeout as check_timeout
from comm_collectives.call.groups.groups import group_state as group_state
from comm_collectives.call.groups.groups import set_agreement as set_agreement
from comm_collectives.call.groups.groups import wire_device_argument as wire_device_argument
from comm_collectives.call.groups.wire_count import count_wire_bytes as count_wire_bytes
