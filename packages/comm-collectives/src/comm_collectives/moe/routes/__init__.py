"""Which way rows go: flat, de-duplicated, or hierarchical over nodes.

May import: base, call, collectives, planning, rows.
"""

from comm_collectives.moe.routes.hops import DedupRouting as DedupRouting
from comm_collectives.moe.routes.local import LocalRouting as LocalRouting
from comm_collectives.moe.routes.nodes import NodeRouting as NodeRouting
from comm_collectives.moe.routes.nodes import check_nodes as check_nodes
from comm_collectives.moe.routes.routing import FlatRouting as FlatRouting
from comm_collectives.moe.routes.routing import Leg as Leg
from comm_collectives.moe.routes.routing import Routing as Routing
from comm_collectives.moe.routes.routing import counts_by_rank as counts_by_rank
