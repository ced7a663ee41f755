"""The weights of a rank's experts, as views of whatever holds them.

Every implementation takes this one description, so that parameters stay where and as they are:
transformers' GPT-OSS keeps its projections transposed and gate and up interleaved, and is used in
place as `ExpertWeights(gate_up_EGD=p.gate_up_proj.mT, ..., interleaved=True)`.

    weights = ExpertWeights(gate_up_EGD=gate_up_proj, down_EDH=down_proj)

Dims: E local experts, D width of a row, H intermediate, G = 2H if gated, else H.
"""

from dataclasses import dataclass
from typing import final

from torch import Tensor

from moe_pipeline.weight_grad import InPlaceAccumulation


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertWeights:
    """Views with any strides, all of one dtype and device.

    Attributes:
        gate_up_EGD: [E, G, D], the first projection: gate and up, or up alone without a gate.
        down_EDH: [E, D, H], the second.
        gate_up_bias_EG: [E, G] or None.
        down_bias_ED: [E, D] or None.
        interleaved: gate and up rows alternate in G; False: gate is the first half.
        accumulation: of the gradients of these weights; only `fused` takes one. None: autograd's.
    """

    gate_up_EGD: Tensor
    down_EDH: Tensor
    gate_up_bias_EG: Tensor | None = None
    down_bias_ED: Tensor | None = None
    interleaved: bool = False
    accumulation: InPlaceAccumulation | None = None
