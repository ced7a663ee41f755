"""Gradients over the right ranks, the update of the parameters, and its learning rate.

May import: config, model, errors, slices; comm_collectives, moe_pipeline, unified_ckpt.
"""

from moe_train.optim.grads import GradientStore as GradientStore
from moe_train.optim.grads import ParameterGroup as ParameterGroup
from moe_train.optim.grads import clip_coefficient as clip_coefficient
from moe_train.optim.lr_schedule import LrSchedule as LrSchedule
from moe_train.optim.optimizer import Optimizer as Optimizer
from moe_train.optim.optimizer import StateOptions as StateOptions
from moe_train.optim.param_shares import ParameterShares as ParameterShares
from moe_train.optim.rounding import StochasticRounding as StochasticRounding
from moe_train.optim.shares import RowShares as RowShares
from moe_train.optim.stage_blocks import StageBlocks as StageBlocks
from moe_train.optim.update_rules import UpdateRule as UpdateRule
from moe_train.optim.update_rules import update_rules as update_rules
