"""The room `routes`."""

from comm_collectives.moe.routes.dedup import DedupProposal as DedupProposal
from comm_collectives.moe.routes.flat import FlatProposal as FlatProposal
from comm_collectives.moe.routes.flat import counts_by_rank as counts_by_rank
from comm_collectives.moe.routes.nodes import NodeProposal as NodeProposal
from comm_collectives.moe.routes.nodes import check_nodes as check_nodes
from comm_collectives.moe.routes.routing import Proposal as Proposal
from comm_collectives.moe.routes.routing import Routing as Routing
from comm_collectives.moe.routes.routing import Travel as Travel
from comm_collectives.moe.routes.routing import local_routing as local_routing
