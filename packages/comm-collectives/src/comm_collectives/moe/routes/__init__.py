"""Which way rows go: flat, de-duplicated, or hierarchical over nodes.

May import: base, call, collectives, planning, rows.
"""

from comm_collectives.moe.routes.dedup import DedupRequest as DedupRequest
from comm_collectives.moe.routes.flat import FlatRequest as FlatRequest
from comm_collectives.moe.routes.flat import counts_by_rank as counts_by_rank
from comm_collectives.moe.routes.nodes import NodeRequest as NodeRequest
from comm_collectives.moe.routes.nodes import check_nodes as check_nodes
from comm_collectives.moe.routes.routing import Leg as Leg
from comm_collectives.moe.routes.routing import RouteRequest as RouteRequest
from comm_collectives.moe.routes.routing import Routing as Routing
from comm_collectives.moe.routes.routing import local_routing as local_routing
