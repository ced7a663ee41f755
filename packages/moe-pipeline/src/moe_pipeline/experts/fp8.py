"""Experts whose forward products take fp8 operands (CUDA, compute capability 9.0 or more).

Rows of the input, of the activation and of both weights become fp8 e4m3 with one fp32 scale each,
the largest magnitude of a row becoming the largest of e4m3 (448). Products accumulate in fp32 and
come out in bf16. Backward is that of the bf16 product of the unrounded tensors (a straight-through
estimate): both its products are in bf16, and what is saved is what `grouped_mm` saves.

    config = MoEConfig(..., experts=ExpertsOptions(fp8=True))

Format: Micikevicius et al., FP8 Formats for Deep Learning (arXiv 2209.05433).

Dims: R routed rows sorted by expert, E local experts, K width of a row and contracted, N outputs.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_pipeline._torch_private import FakeTensor
from moe_pipeline.errors import MoEValueError
from moe_pipeline.experts.activations import Activation
from moe_pipeline.experts.grouped import grouped_experts, row_sizes, taken
from moe_pipeline.experts.weights import ExpertWeights
from moe_pipeline.weight_grad import DeferredWeightGrad, defer, deferrable

FP8_DTYPE = torch.float8_e4m3fn
FP8_LARGEST = torch.finfo(FP8_DTYPE).max
_ALIGNMENT = 16
_BLOCK_ELEMENTS = 1 << 24
_SMALLEST_SCALE = 2.0**-126  # smaller ones are not normal fp32 numbers


class QuantizedRows(NamedTuple):
    """Rows in fp8, with what multiplies them."""

    values: Tensor  # fp8 e4m3 [..., K], contiguous
    scales: Tensor  # fp32 [...], one for each row

    def dequantized(self) -> Tensor:
        """`values * scales` in fp32."""
        return self.values.float() * self.scales.unsqueeze(-1)


def quantize_rows(rows: Tensor) -> QuantizedRows:
    """Each row [..., K] in fp8 e4m3, scaled so that its largest magnitude becomes 448.

    Rounded to nearest, so that each number is off by at most 1/16 of itself, or 2^-10 scales where
    it is smaller than 2^-6 scales. A row of zeros stays one; a row with an infinity or a NaN
    becomes NaN, so that it is seen. Not collective, no gradient.
    """
    width = rows.shape[-1]
    flat_RK = rows.detach().reshape(rows.shape[:-1].numel(), width)
    values_RK = torch.empty(flat_RK.shape, dtype=FP8_DTYPE, device=rows.device)
    scales_R = torch.empty(flat_RK.shape[0], dtype=torch.float32, device=rows.device)
    step = max(1, _BLOCK_ELEMENTS // max(1, width))
    for start in range(0, flat_RK.shape[0] if width else 0, step):
        block = slice(start, start + step)
        wide = flat_RK[block].float()
        largest = wide.abs().amax(dim=-1, keepdim=True)
        scale = (largest / FP8_LARGEST).clamp_(min=_SMALLEST_SCALE)
        values_RK[block] = (wide / scale).to(FP8_DTYPE)
        scales_R[block] = scale.squeeze(-1)
    return QuantizedRows(values_RK.view(rows.shape), scales_R.view(rows.shape[:-1]))


Kernel = Callable[[QuantizedRows, QuantizedRows, Tensor], Tensor]


def scaled_grouped_mm(rows: QuantizedRows, weight: QuantizedRows, offsets_E: Tensor) -> Tensor:
    """bf16 [R, N]: rows [R, K] of expert e, which end at `offsets_E[e]`, times weight [E, N, K]."""
    by_row = F.ScalingType.RowWise
    product: Tensor = F.scaled_grouped_mm(  # type: ignore[attr-defined]  # not in its stubs
        rows.values,
        weight.values.mT,
        rows.scales,
        by_row,
        weight.scales,
        by_row,
        offs=offsets_E,
        output_dtype=torch.bfloat16,
        use_fast_accum=False,
    )
    return product


def fp8_product(rows_RK: Tensor, weight_ENK: Tensor, offsets_E: Tensor, kernel: Kernel) -> Tensor:
    """[R, N] by a kernel on fp8 operands; differentiable once, with bf16 products.

    Both are bf16; the rows of expert e end at `offsets_E[e]` (int32). On CUDA the kernel is
    `scaled_grouped_mm`.
    """
    if rows_RK.shape[0] == 0:  # grouped kernels refuse such strides; this has gradients of zero
        return rows_RK @ weight_ENK.sum(0).t()
    weight_ENK, deferred = deferrable(taken(weight_ENK))
    return _Fp8Product.apply(  # type: ignore[no-any-return]
        rows_RK, weight_ENK, offsets_E, kernel, deferred
    )


@final
class _Fp8Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows_RK: Tensor,
        weight_ENK: Tensor,
        offsets_E: Tensor,
        kernel: Kernel,
        deferred: DeferredWeightGrad | None,
    ) -> Tensor:
        needs_rows, needs_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(
            rows_RK if needs_weight else None, weight_ENK if needs_rows else None, offsets_E
        )
        ctx.deferred = deferred
        return kernel(quantize_rows(rows_RK), quantize_rows(weight_ENK), offsets_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RN: Tensor) -> tuple[Tensor | None, ...]:
        rows_RK, weight_ENK, offsets_E = ctx.saved_tensors
        grad_RN = grad_RN.contiguous()
        grad_RK = grad_ENK = None
        if weight_ENK is not None:
            grad_RK = F.grouped_mm(grad_RN, weight_ENK, offs=offsets_E)
        if rows_RK is not None:
            grad_ENK = defer(ctx.deferred, _grad_of_experts, rows_RK, grad_RN, offsets_E)
        return grad_RK, grad_ENK, None, None, None


def _grad_of_experts(rows_RK: Tensor, grad_RN: Tensor, offsets_E: Tensor) -> Tensor:
    return F.grouped_mm(grad_RN.mT, rows_RK, offs=offsets_E)


def fp8_experts(
    x_RD: Tensor,
    weights_R: Tensor,
    weights: ExpertWeights,
    num_tokens_per_expert: tuple[int, ...],
    activation: Activation,
) -> Tensor:
    """Two grouped products in fp8; see `moe_pipeline.experts.compute.experts_function`."""
    obstacle = fp8_obstacle(weights)
    if obstacle:
        raise MoEValueError(f"experts option fp8=True {obstacle}; or leave fp8=False")
    product = partial(fp8_product, kernel=scaled_grouped_mm)
    return grouped_experts(x_RD, weights_R, weights, num_tokens_per_expert, activation, product)


def fp8_obstacle(weights: ExpertWeights) -> str | None:
    """Why these weights cannot be multiplied in fp8, with the remedy, or None."""
    down_EDH = weights.down_EDH
    if down_EDH.dtype != torch.bfloat16:
        return f"needs weights in torch.bfloat16, got {down_EDH.dtype}; convert the layer"
    for name, size in row_sizes(weights).items():
        if size % _ALIGNMENT:
            return f"needs sizes in multiples of {_ALIGNMENT}, got {name}={size}; choose another"
    if isinstance(down_EDH, FakeTensor):  # nothing is computed
        return None
    if down_EDH.device.type != "cuda":
        return f"needs a CUDA device, got {down_EDH.device.type}; move the layer"
    capability = torch.cuda.get_device_capability(down_EDH.device)
    if capability < (9, 0):
        return (
            f"needs a CUDA device of compute capability 9.0 or more, got {capability[0]}."
            f"{capability[1]}; choose a newer one"
        )
    return None
