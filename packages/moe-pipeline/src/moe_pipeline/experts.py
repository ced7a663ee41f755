"""The expert MLPs of one rank, over rows sorted by expert.

`y = weight * down(silu(gate(x)) * up(x))` for each routed row. Parameters have the names and
layouts of transformers' fused experts: `gate_up_proj` [E_local, 2H, D] with the gate in the first H
rows, and `down_proj` [E_local, D, H].

Implementations, one signature:

- `loop`: plain autograd, one product per expert and projection. Any float dtype, differentiable
  twice; the reference.
- `fused`: `moe_pipeline.fused_experts`. Saves the least. Any float dtype.
- `grouped_mm`: `torch.nn.functional.grouped_mm`. No fp64; D and H in multiples of 16 bytes.
- `auto`: what `choose_implementation` says.

    experts = Experts(config, num_local_experts=8)
    y_RD = experts(x_RD, (3, 0, 5, 1, 0, 0, 2, 1), topk_weights_R)

Dims: R routed rows sorted by expert, D hidden, H intermediate, E local experts, G = 2H.
"""

from collections.abc import Callable, Sequence
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_pipeline.config import MoEConfig
from moe_pipeline.fused_experts import FusedExperts


def loop_experts(
    x_RD: Tensor,
    weights_R: Tensor,
    gate_up_EGD: Tensor,
    down_EDH: Tensor,
    num_tokens_per_expert: tuple[int, ...],
) -> Tensor:
    """One product per expert and projection, with autograd's own backward."""
    # One unbind per weight: selecting expert by expert would make one full-size gradient for each.
    experts = zip(gate_up_EGD.unbind(0), down_EDH.unbind(0), strict=True)
    rows = zip(
        torch.split(x_RD, list(num_tokens_per_expert)),
        torch.split(weights_R, list(num_tokens_per_expert)),
        strict=True,
    )
    outputs = []
    for (x, weights), (gate_up, down) in zip(rows, experts, strict=True):
        gate, up = F.linear(x, gate_up).chunk(2, dim=1)
        outputs.append(F.linear(F.silu(gate) * up * weights.unsqueeze(1), down))
    return torch.cat(outputs)


def grouped_mm_experts(
    x_RD: Tensor,
    weights_R: Tensor,
    gate_up_EGD: Tensor,
    down_EDH: Tensor,
    num_tokens_per_expert: tuple[int, ...],
) -> Tensor:
    """Two `grouped_mm` products over all experts, with autograd's own backward.

    Raises:
        ValueError: fp64, or D or H whose rows are not a multiple of 16 bytes.
    """
    obstacle = _grouped_mm_obstacle(gate_up_EGD, down_EDH)
    if obstacle:
        raise ValueError(
            f"experts_implementation='grouped_mm' {obstacle}; choose 'fused' or 'loop'"
        )
    counts = torch.tensor(num_tokens_per_expert, dtype=torch.int32)
    offsets = counts.cumsum(0, dtype=torch.int32).to(x_RD.device)
    gate_up_RG = F.grouped_mm(x_RD.contiguous(), gate_up_EGD.transpose(1, 2), offs=offsets)
    gate, up = gate_up_RG.chunk(2, dim=1)
    act = F.silu(gate) * up * weights_R.unsqueeze(1)
    y_RD = F.grouped_mm(act, down_EDH.transpose(1, 2), offs=offsets)
    # grouped_mm's backward refuses an expanded gradient, such as that of `y.sum()`.
    return _DenseGradient.apply(y_RD)  # type: ignore[no-any-return]


@final
class _DenseGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad.contiguous()


def fused_experts(
    x_RD: Tensor,
    weights_R: Tensor,
    gate_up_EGD: Tensor,
    down_EDH: Tensor,
    num_tokens_per_expert: tuple[int, ...],
) -> Tensor:
    """`FusedExperts` on contiguous rows."""
    return FusedExperts.apply(  # type: ignore[no-any-return]
        x_RD.contiguous(), weights_R, gate_up_EGD, down_EDH, num_tokens_per_expert
    )


ExpertsFunction = Callable[[Tensor, Tensor, Tensor, Tensor, tuple[int, ...]], Tensor]

IMPLEMENTATIONS: dict[str, ExpertsFunction] = {
    "loop": loop_experts,
    "fused": fused_experts,
    "grouped_mm": grouped_mm_experts,
}


def choose_implementation(gate_up_EGD: Tensor, down_EDH: Tensor) -> str:
    """What `auto` stands for, by device, dtype and sizes of the weights.

    - CUDA in bf16, in sizes that `grouped_mm` takes: `grouped_mm`, one kernel for all experts.
    - Everything else: `fused`. On a CPU it measured as fast as `grouped_mm` in bf16 and faster in
      fp32 (`benchmarks/moe_pipeline_layer.py`), and saves a third as much.

    Not measured on CUDA by this package's benchmarks yet.
    """
    on_gpu = gate_up_EGD.device.type == "cuda" and gate_up_EGD.dtype == torch.bfloat16
    return "grouped_mm" if on_gpu and not _grouped_mm_obstacle(gate_up_EGD, down_EDH) else "fused"


@final
class Experts(nn.Module):
    """The experts that one rank holds."""

    def __init__(
        self,
        config: MoEConfig,
        *,
        num_local_experts: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        local = config.num_experts if num_local_experts is None else num_local_experts
        d, h = config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(local, 2 * h, d, device=device, dtype=dtype))
        self.down_proj = nn.Parameter(torch.empty(local, d, h, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw both weights from a normal distribution with `initializer_range`."""
        nn.init.normal_(self.gate_up_proj, std=self.config.initializer_range)
        nn.init.normal_(self.down_proj, std=self.config.initializer_range)

    def forward(
        self, x_RD: Tensor, num_tokens_per_expert: Sequence[int], topk_weights_R: Tensor
    ) -> Tensor:
        """Apply each row's expert and weight. Not collective.

        Args:
            x_RD: [R, D] rows sorted by local expert, in the dtype of the parameters.
            num_tokens_per_expert: rows of each local expert; sums to R; zeros allowed.
            topk_weights_R: [R] router weights, any float dtype; taken in the dtype of `x_RD`.

        Returns:
            [R, D], same dtype as `x_RD`.

        Raises:
            ValueError: shapes or counts that do not fit.
            TypeError: `x_RD` in another dtype than the parameters.
        """
        counts = tuple(num_tokens_per_expert)
        self._check(x_RD, counts, topk_weights_R)
        name = self.config.experts_implementation
        if name == "auto":
            name = choose_implementation(self.gate_up_proj, self.down_proj)
        weights_R = topk_weights_R.to(x_RD.dtype)
        return IMPLEMENTATIONS[name](x_RD, weights_R, self.gate_up_proj, self.down_proj, counts)

    def _check(self, x_RD: Tensor, counts: tuple[int, ...], weights_R: Tensor) -> None:
        local, _, d = self.gate_up_proj.shape
        if x_RD.dim() != 2 or x_RD.shape[1] != d:
            raise ValueError(f"experts expect [rows, {d}], got shape {tuple(x_RD.shape)}")
        if len(counts) != local or sum(counts) != x_RD.shape[0] or min(counts, default=0) < 0:
            raise ValueError(
                f"num_tokens_per_expert={counts} must hold {local} counts that sum to the "
                f"{x_RD.shape[0]} rows"
            )
        if weights_R.shape != x_RD.shape[:1]:
            raise ValueError(
                f"topk_weights_R must have one weight for each of the {x_RD.shape[0]} rows, "
                f"got shape {tuple(weights_R.shape)}"
            )
        if x_RD.dtype != self.gate_up_proj.dtype:
            raise TypeError(
                f"experts hold {self.gate_up_proj.dtype} and got rows in {x_RD.dtype}; "
                "convert the input or the layer"
            )


def _grouped_mm_obstacle(gate_up_EGD: Tensor, down_EDH: Tensor) -> str | None:
    """Why `grouped_mm` cannot take these weights, or None."""
    dtype = gate_up_EGD.dtype
    if dtype == torch.float64:
        return "has no fp64"
    _, hidden, intermediate = down_EDH.shape
    for name, size in (("hidden_size", hidden), ("moe_intermediate_size", intermediate)):
        if size * dtype.itemsize % 16:
            return (
                f"needs rows in multiples of 16 bytes, but {name}={size} in {dtype} has "
                f"{size * dtype.itemsize}"
            )
    return None
