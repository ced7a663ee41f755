"""How a weight gets its gradient: deferred until W, added in place, or through autograd.

May import: no room.
"""

from moe_pipeline.weight_grad.accumulation import GradTarget as GradTarget
from moe_pipeline.weight_grad.accumulation import InPlaceAccumulation as InPlaceAccumulation
from moe_pipeline.weight_grad.accumulation import product as product
from moe_pipeline.weight_grad.deferred import DeferredWeightGrad as DeferredWeightGrad
from moe_pipeline.weight_grad.deferred import accumulated as accumulated
from moe_pipeline.weight_grad.deferred import defer as defer
from moe_pipeline.weight_grad.deferred import deferrable as deferrable
from moe_pipeline.weight_grad.delivery import deliver as deliver
from moe_pipeline.weight_grad.split_linear import looped_product as looped_product
from moe_pipeline.weight_grad.store import WeightGradStore as WeightGradStore
from moe_pipeline.weight_grad.store import current_split as current_split
from moe_pipeline.weight_grad.store import split_backward as split_backward
