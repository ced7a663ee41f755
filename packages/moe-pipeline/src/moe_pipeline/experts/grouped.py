"""All experts by two calls of `torch.nn.functional.grouped_mm`, with autograd's own backward.

One kernel for all experts on CUDA. On a CPU it is a loop inside torch.

What it cannot take is refused by name: fp64, and rows that are not a multiple of 16 bytes.

Dims: R rows sorted by expert, D wide, H intermediate, E local experts, G = 2H (H without a gate).
"""

from collections.abc import Callable
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_pipeline._torch_private import address
from moe_pipeline.errors import MoEValueError
from moe_pipeline.experts.activations import Activation
from moe_pipeline.experts.weights import ExpertWeights

_ALIGNMENT_BYTES = 16


def grouped_mm_experts(
    x_RD: Tensor,
    weights_R: Tensor,
    weights: ExpertWeights,
    num_tokens_per_expert: tuple[int, ...],
    activation: Activation,
) -> Tensor:
    """Two grouped products; see `moe_pipeline.experts.compute.experts_function`."""
    obstacle = grouped_mm_obstacle(weights)
    if obstacle:
        raise MoEValueError(
            f"experts_implementation='grouped_mm' {obstacle}; choose 'fused' or 'loop'"
        )
    return grouped_experts(x_RD, weights_R, weights, num_tokens_per_expert, activation, _product)


def grouped_experts(
    x_RD: Tensor,
    weights_R: Tensor,
    weights: ExpertWeights,
    num_tokens_per_expert: tuple[int, ...],
    activation: Activation,
    product: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """Experts by any differentiable grouped product.

    `product(rows [R, K], weight [E, N, K], offsets int32 [E])` gives [R, N]: the rows of expert e,
    which end at `offsets[e]`, times its transposed weight, which may have any strides.
    """
    counts = torch.tensor(num_tokens_per_expert, dtype=torch.int32, device="cpu")
    ends = counts.cumsum(0, dtype=torch.int32)
    # For copies of pinned memory the host does not wait.
    offsets = (ends.pin_memory() if x_RD.is_cuda else ends).to(x_RD.device, non_blocking=True)
    pre_RG = product(x_RD.contiguous(), weights.gate_up_EGD, offsets)
    if weights.gate_up_bias_EG is not None:
        pre_RG = pre_RG + _per_row(weights.gate_up_bias_EG, counts)
    weights_R1 = weights_R.unsqueeze(1)
    act = (activation(pre_RG) * weights_R1).to(x_RD.dtype)
    y_RD = product(act, weights.down_EDH, offsets)
    if weights.down_bias_ED is not None:
        y_RD = y_RD + (_per_row(weights.down_bias_ED, counts) * weights_R1).to(x_RD.dtype)
    # grouped_mm's backward refuses an expanded gradient, such as that of `y.sum()`.
    return _DenseGradient.apply(y_RD)  # type: ignore[no-any-return]


def _product(rows_RK: Tensor, weight_ENK: Tensor, offsets_E: Tensor) -> Tensor:
    return F.grouped_mm(rows_RK, taken(weight_ENK).mT, offs=offsets_E)


def grouped_mm_obstacle(weights: ExpertWeights) -> str | None:
    """Why `grouped_mm` cannot take these weights, or None."""
    dtype = weights.down_EDH.dtype
    if dtype == torch.float64:
        return "has no fp64"
    for name, size in row_sizes(weights).items():
        if size * dtype.itemsize % _ALIGNMENT_BYTES:
            return (
                f"needs rows in multiples of {_ALIGNMENT_BYTES} bytes, but {name}={size} in "
                f"{dtype} has {size * dtype.itemsize}"
            )
    return None


def row_sizes(weights: ExpertWeights) -> dict[str, int]:
    """The widths of the rows that products take, by the options that they follow from."""
    _, width, intermediate = weights.down_EDH.shape
    return {
        "hidden_size (or moe_latent_size)": width,
        "moe_intermediate_size (of this etp rank)": intermediate,
    }


def taken(weight: Tensor) -> Tensor:
    """The weight in strides that the kernel takes: its own, or a copy."""
    matrix = sorted(weight.stride()[1:])
    aligned = all(
        s * weight.itemsize % _ALIGNMENT_BYTES == 0 for s in (matrix[1], weight.stride(0))
    )
    start = address(weight) % _ALIGNMENT_BYTES
    return weight if matrix[0] == 1 and aligned and start == 0 else weight.contiguous()


def _per_row(bias_EN: Tensor, counts: Tensor) -> Tensor:
    """[R, N]: each row's bias."""
    rows = torch.repeat_interleave(counts).to(bias_EN.device)
    return _PerRow.apply(bias_EN, rows)  # type: ignore[no-any-return]


@final
class _PerRow(torch.autograd.Function):
    """`index_select`, whose gradient torch would add up row by row in the bias's own dtype."""

    @staticmethod
    def forward(ctx: Any, bias_EN: Tensor, rows_R: Tensor) -> Tensor:
        ctx.save_for_backward(rows_R)
        ctx.shape, ctx.dtype = bias_EN.shape, bias_EN.dtype
        return bias_EN.index_select(0, rows_R)

    @staticmethod
    def backward(ctx: Any, grad_RN: Tensor) -> tuple[Tensor, None]:
        (rows_R,) = ctx.saved_tensors
        wide = torch.promote_types(grad_RN.dtype, torch.float32)
        total_EN = torch.zeros(ctx.shape, dtype=wide, device=grad_RN.device)
        return total_EN.index_add(0, rows_R, grad_RN.to(wide)).to(ctx.dtype), None


@final
class _DenseGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad.contiguous()
