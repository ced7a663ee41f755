"""Gradients over the right ranks, and AdamW with its learning rate.

May import: config, model; comm_collectives, moe_pipeline.
"""

from moe_train.optim.adamw import AdamW as AdamW
from moe_train.optim.adamw import learning_rate as learning_rate
from moe_train.optim.grads import GradientStore as GradientStore
from moe_train.optim.grads import ParameterGroup as ParameterGroup
from moe_train.optim.grads import clip_coefficient as clip_coefficient
