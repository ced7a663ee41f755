"""What a job says about its experts: their balance, the ways of tokens, and which rank has which.

May import: checkpoint, config, data, layout, model, optim, rank, report, tokenization, parallel,
errors; comm_collectives, moe_pipeline.
"""

from moe_train.training.experts.balancing import aux_loss_coef as aux_loss_coef
from moe_train.training.experts.balancing import check_balancing as check_balancing
from moe_train.training.experts.dispatching import dispatch_options as dispatch_options
from moe_train.training.experts.loads import ExpertLoads as ExpertLoads
from moe_train.training.experts.loads import expert_parts as expert_parts
from moe_train.training.experts.products import check_products as check_products
