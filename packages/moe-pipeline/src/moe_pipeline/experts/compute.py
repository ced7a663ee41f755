"""What experts compute, over rows sorted by expert, behind one signature.

`y = weight * (down(act(gate_up(x))) + bias)` for each routed row;
`moe_pipeline.experts.activations` says what `act` is. Parameters have the names and layouts of
transformers' fused experts: `gate_up_proj` [E, 2H, D] with the gate in the first H rows (`up_proj`
[E, H, D] without a gate), `down_proj` [E, D, H], and with biases `gate_up_proj_bias` or
`up_proj_bias` [E, G] and `down_proj_bias` [E, D].

Implementations (`experts_function`):

- `loop`: plain autograd, one product per expert and projection. Any float dtype, differentiable
  twice; the reference.
- `fused`: `moe_pipeline.experts.fused`. Saves the least. Any float dtype.
- `grouped_mm`: `moe_pipeline.experts.grouped`. No fp64; D and H in multiples of 16 bytes.
- `auto`: what `choose_implementation` says.

    y_RD = experts_function(x_RD, weights_R, weights, (3, 0, 5, 1), ExpertsOptions())

Dims: R rows sorted by expert, D wide, H intermediate, E local experts, G = 2H (H without a gate).
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_pipeline.config import ExpertsOptions
from moe_pipeline.errors import MoETypeError, MoEValueError
from moe_pipeline.experts.activations import Activation
from moe_pipeline.experts.fp8 import fp8_experts
from moe_pipeline.experts.fused import fused_experts
from moe_pipeline.experts.grouped import (
    grouped_experts,
    grouped_mm_experts,
    grouped_mm_obstacle,
)
from moe_pipeline.experts.weights import ExpertWeights
from moe_pipeline.weight_grad import current_split, looped_product


def loop_experts(
    x_RD: Tensor,
    weights_R: Tensor,
    weights: ExpertWeights,
    num_tokens_per_expert: tuple[int, ...],
    activation: Activation,
) -> Tensor:
    """One product per expert and projection, with autograd's own backward.

    Under `split_backward` each projection is one function that can defer its weight's gradient.
    """
    if current_split() is not None:

        def product(rows_RK: Tensor, weight_ENK: Tensor, _: Tensor) -> Tensor:
            return looped_product(rows_RK, weight_ENK, num_tokens_per_expert)

        return grouped_experts(x_RD, weights_R, weights, num_tokens_per_expert, activation, product)
    # One unbind per weight: selecting expert by expert would make one full-size gradient for each.
    num_experts = len(num_tokens_per_expert)
    experts = zip(
        weights.gate_up_EGD.unbind(0),
        weights.down_EDH.unbind(0),
        _unbind(weights.gate_up_bias_EG, num_experts),
        _unbind(weights.down_bias_ED, num_experts),
        strict=True,
    )
    rows = zip(
        torch.split(x_RD, list(num_tokens_per_expert)),
        torch.split(weights_R.unsqueeze(1), list(num_tokens_per_expert)),
        strict=True,
    )
    outputs = []
    for (x, w), (gate_up, down, gate_up_bias, down_bias) in zip(rows, experts, strict=True):
        act = activation(F.linear(x, gate_up, gate_up_bias)) * w
        y = F.linear(act.to(x.dtype), down)
        outputs.append(y if down_bias is None else y + (w * down_bias).to(x.dtype))
    return torch.cat(outputs).to(x_RD.dtype)  # autocast's products are in its own


def _unbind(bias: Tensor | None, num_experts: int) -> Sequence[Tensor | None]:
    return [None] * num_experts if bias is None else bias.unbind(0)


ExpertsFunction = Callable[[Tensor, Tensor, ExpertWeights, tuple[int, ...], Activation], Tensor]

IMPLEMENTATIONS: dict[str, ExpertsFunction] = {
    "loop": loop_experts,
    "fused": fused_experts,
    "grouped_mm": grouped_mm_experts,
    "fp8": fp8_experts,  # chosen by `ExpertsOptions.fp8`
}


def choose_implementation(weights: ExpertWeights, options: ExpertsOptions) -> str:
    """The implementation that `options` name, or for `auto`, by device, dtype and sizes:

    - no experts on this rank: `fused`, since the backward of `grouped_mm` refuses empty weights.
    - option `fp8`: `moe_pipeline.experts.fp8`, which refuses what it cannot take.
    - CUDA in bf16, in sizes that `grouped_mm` takes: `grouped_mm`, one kernel for all experts.
    - Everything else, and whatever has an `accumulation`: `fused`. On a CPU it measured faster than
      `grouped_mm` (`benchmarks/moe_pipeline_layer.py`), and saves a third as much.

    Not measured on CUDA by this package's benchmarks yet.
    """
    if not weights.down_EDH.shape[0]:
        return "fused"
    if options.fp8:
        return "fp8"
    if options.experts_implementation != "auto":
        return options.experts_implementation
    on_gpu = weights.down_EDH.device.type == "cuda" and weights.down_EDH.dtype == torch.bfloat16
    if on_gpu and weights.accumulation is None and not grouped_mm_obstacle(weights):
        return "grouped_mm"
    return "fused"


def experts_function(
    x_RD: Tensor,
    weights_R: Tensor,
    weights: ExpertWeights,
    num_tokens_per_expert: Sequence[int],
    options: ExpertsOptions,
) -> Tensor:
    """Apply each row's expert and router weight: [R, D] in the dtype of `x_RD`. Not collective.

    Args:
        x_RD: [R, D] rows sorted by local expert, any strides, in the dtype of the weights.
        weights_R: [R] router weights, any float dtype.
        weights: held anywhere; biases are used where it has them.
        num_tokens_per_expert: rows of each local expert; sums to R; zeros allowed.
        options: activation and implementation.
    """
    counts = tuple(num_tokens_per_expert)
    _check_counts(x_RD, weights_R, weights, counts)
    activation = Activation.of(options, interleaved=weights.interleaved)
    function = IMPLEMENTATIONS[choose_implementation(weights, options)]
    return function(x_RD, weights_R, weights, counts, activation)


def check_rows(x_RD: Tensor, weights: ExpertWeights) -> None:
    """Refuse rows of another width or dtype than the weights'."""
    d = weights.gate_up_EGD.shape[2]
    if x_RD.dim() != 2 or x_RD.shape[1] != d:
        raise MoEValueError(f"experts expect [rows, {d}], got shape {tuple(x_RD.shape)}")
    if x_RD.dtype != weights.gate_up_EGD.dtype:
        raise MoETypeError(
            f"experts hold {weights.gate_up_EGD.dtype} and got rows in {x_RD.dtype}; "
            "convert the input or the layer"
        )


def _check_counts(
    x_RD: Tensor, weights_R: Tensor, weights: ExpertWeights, counts: tuple[int, ...]
) -> None:
    check_rows(x_RD, weights)
    local = weights.gate_up_EGD.shape[0]
    if len(counts) != local or sum(counts) != x_RD.shape[0] or min(counts, default=0) < 0:
        raise MoEValueError(
            f"num_tokens_per_expert={counts} must hold {local} counts that sum to the "
            f"{x_RD.shape[0]} rows"
        )
    if weights_R.shape != x_RD.shape[:1]:
        raise MoEValueError(
            f"topk_weights_R must have one weight for each of the {x_RD.shape[0]} rows, "
            f"got shape {tuple(weights_R.shape)}"
        )
