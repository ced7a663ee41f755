"""Which experts each token goes to, with what weight, and the losses that balance their load.

May import: ops, schedules, scoring, weight_grad, comm_collectives.
"""

from moe_pipeline.router.aux_loss import BalanceTerms as BalanceTerms
from moe_pipeline.router.aux_loss import global_batch_loss as global_batch_loss
from moe_pipeline.router.aux_loss import global_batch_shares as global_batch_shares
from moe_pipeline.router.aux_loss import router_losses as router_losses
from moe_pipeline.router.expert_bias import update_expert_bias as update_expert_bias
from moe_pipeline.router.scope_check import check_aux_scope as check_aux_scope
from moe_pipeline.router.top_k import TopKRouter as TopKRouter
from moe_pipeline.routing_plan import Routed as Routed
from moe_pipeline.routing_plan import RoutingPlan as RoutingPlan
