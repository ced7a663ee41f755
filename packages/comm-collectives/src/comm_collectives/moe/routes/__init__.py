"""Which way rows go: flat, de-duplicated, or hierarchical over nodes.

May import: base, call, collectives, planning, rows.
"""

from comm_collectives.moe.routes.local import LocalRouting as LocalRouting
from comm_collectives.moe.routes.nodes import NodeRouting as NodeRouting
from comm_collectives.moe.routes.ranks import RankRouting as RankRouting
from comm_collectives.moe.routes.ranks import counts_by_rank as counts_by_rank
from comm_collectives.moe.routes.routing import Carried as Carried
from comm_collectives.moe.routes.routing import Leg as Leg
from comm_collectives.moe.routes.routing import Routing as Routing
