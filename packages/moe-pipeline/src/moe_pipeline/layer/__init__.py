"""The MoE layer itself: it puts router, dispatch, experts and combine together for one rank.

May import: experts, recomputation, router, weight_grad, comm_collectives.
"""

from moe_pipeline.layer.folding import fold_experts as fold_experts
from moe_pipeline.layer.local_experts import Experts as Experts
from moe_pipeline.layer.moe_layer import MoELayer as MoELayer
from moe_pipeline.layer.moe_layer import MoEOutput as MoEOutput
from moe_pipeline.layer.router_replay import record_routing as record_routing
from moe_pipeline.layer.router_replay import replay_routing as replay_routing
from moe_pipeline.layer.token_dispatch import DispatchOptions as DispatchOptions
