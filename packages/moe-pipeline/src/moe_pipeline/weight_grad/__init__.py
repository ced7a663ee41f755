"""The room `weight_grad`."""

from moe_pipeline.weight_grad.accumulation import product as product
from moe_pipeline.weight_grad.deferred import Splitting as Splitting
from moe_pipeline.weight_grad.deferred import WeightToken as WeightToken
from moe_pipeline.weight_grad.deferred import current_splitting as current_splitting
from moe_pipeline.weight_grad.deferred import put_off as put_off
from moe_pipeline.weight_grad.deferred import splittable as splittable
from moe_pipeline.weight_grad.grad_buffers import GradBuffers as GradBuffers
from moe_pipeline.weight_grad.grad_buffers import GradTarget as GradTarget
from moe_pipeline.weight_grad.split_linear import looped_product as looped_product
from moe_pipeline.weight_grad.store import WeightQueue as WeightQueue
from moe_pipeline.weight_grad.store import split_again as split_again
from moe_pipeline.weight_grad.store import split_backward as split_backward
