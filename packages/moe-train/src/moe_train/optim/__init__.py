"""Gradients over the right ranks, and AdamW with its learning rate.

May import: config, model, errors; comm_collectives, moe_pipeline.
"""

from moe_train.optim.adamw import AdamW as AdamW
from moe_train.optim.grads import GradientStore as GradientStore
from moe_train.optim.grads import ParameterGroup as ParameterGroup
from moe_train.optim.grads import clip_coefficient as clip_coefficient
from moe_train.optim.lr_schedule import LrSchedule as LrSchedule
