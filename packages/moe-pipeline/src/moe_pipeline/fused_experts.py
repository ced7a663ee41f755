"""All experts as one autograd function: little saved, little copied.

Plain autograd saves, for each routed row, the input, the gate-up output, the activated gate, the
product and the unweighted output, and makes a weight gradient by summing per-expert pieces. This
function saves the input, the gate-up output and the router weights only; everything else is cheap
to compute again. Three further points make it fast:

- router weights multiply the activation (h wide) before the down projection instead of the output
  (D wide) after it, which is the same number: `w * (W a) = W (w * a)`;
- each weight gradient is one tensor into which the experts' products are written in place; an
  expert without rows gets zeros there and no product;
- the elementwise work runs on blocks of neighbouring experts whose rows fit in the cache, between
  the products that make and use them.

The gradient is not itself differentiable: use the `loop` implementation for second derivatives.

Dims: R routed rows sorted by expert, D hidden, H intermediate, E local experts, G = 2H.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

# Elements of a block's [rows, H] intermediate: a handful of them in fp32 stay near the cores.
_CPU_BLOCK_ELEMENTS = 1 << 17


@dataclass(frozen=True, slots=True)
class _Block:
    """Neighbouring experts that are worked on together: rows [start, end) and who owns which."""

    start: int
    end: int
    experts: tuple[int, ...]  # only those with rows
    counts: tuple[int, ...]  # rows of each of them


def _blocks(num_tokens_per_expert: Sequence[int], max_rows: int) -> Iterator[_Block]:
    start = end = 0
    experts: list[int] = []
    counts: list[int] = []
    for expert, count in enumerate(num_tokens_per_expert):
        if experts and end - start + count > max_rows:
            yield _Block(start, end, tuple(experts), tuple(counts))
            start, experts, counts = end, [], []
        if count:
            experts.append(expert)
            counts.append(count)
            end += count
    if experts:
        yield _Block(start, end, tuple(experts), tuple(counts))


def _max_rows(x_RD: Tensor, intermediate_size: int) -> int:
    if x_RD.device.type != "cpu":
        return max(1, x_RD.shape[0])
    return max(1, _CPU_BLOCK_ELEMENTS // intermediate_size)


@final
class FusedExperts(torch.autograd.Function):
    """`weight * down(silu(gate) * up)` for all experts; see the module's docstring."""

    @staticmethod
    def forward(
        ctx: Any,
        x_RD: Tensor,
        weights_R: Tensor,
        gate_up_EGD: Tensor,
        down_EDH: Tensor,
        num_tokens_per_expert: tuple[int, ...],
    ) -> Tensor:
        """Rows sorted by expert in, weighted rows out; all of one dtype."""
        hidden = down_EDH.shape[2]
        gate_up_RG = x_RD.new_empty(x_RD.shape[0], 2 * hidden)
        y_RD = torch.empty_like(x_RD)
        # One split or unbind for all experts costs a fraction of as many slices.
        gate_up_EDG, down_EHD = gate_up_EGD.mT.unbind(), down_EDH.mT.unbind()
        for block in _blocks(num_tokens_per_expert, _max_rows(x_RD, hidden)):
            rows = slice(block.start, block.end)
            gate_up, counts = gate_up_RG[rows], list(block.counts)
            pieces = (x_RD[rows].split(counts), gate_up.split(counts))
            for expert, x, out in zip(block.experts, *pieces, strict=True):
                torch.mm(x, gate_up_EDG[expert], out=out)
            act = F.silu(gate_up[:, :hidden])
            act.mul_(gate_up[:, hidden:]).mul_(weights_R[rows].unsqueeze(1))
            pieces = (act.split(counts), y_RD[rows].split(counts))
            for expert, a, out in zip(block.experts, *pieces, strict=True):
                torch.mm(a, down_EHD[expert], out=out)
        ctx.save_for_backward(x_RD, weights_R, gate_up_RG, gate_up_EGD, down_EDH)
        ctx.num_tokens_per_expert = num_tokens_per_expert
        return y_RD

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_y_RD: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, None]:
        """Gradients of rows, router weights and both projections."""
        x_RD, weights_R, gate_up_RG, gate_up_EGD, down_EDH = ctx.saved_tensors
        grads = _Gradients.allocate(ctx.needs_input_grad, x_RD, weights_R, gate_up_EGD, down_EDH)
        grads.zero_empty(ctx.num_tokens_per_expert)
        grad_y_RD = grad_y_RD.contiguous()
        gate_ups, downs = gate_up_EGD.unbind(), down_EDH.unbind()
        for block in _blocks(ctx.num_tokens_per_expert, _max_rows(x_RD, down_EDH.shape[2])):
            rows, counts = slice(block.start, block.end), list(block.counts)
            grad_ys = grad_y_RD[rows].split(counts)
            grad_act = x_RD.new_empty(block.end - block.start, down_EDH.shape[2])
            for expert, grad_y, out in zip(
                block.experts, grad_ys, grad_act.split(counts), strict=True
            ):
                torch.mm(grad_y, downs[expert], out=out)
            act, grad_gate_up = _swiglu_backward(
                gate_up_RG[rows], weights_R[rows], grad_act, grads.weights_of(rows)
            )
            grad_gate_ups = grad_gate_up.split(counts)
            grads.write_down(block, grad_ys, act.split(counts))
            grads.write_gate_up(block, grad_gate_ups, x_RD[rows].split(counts))
            grads.write_x(block, grad_gate_ups, gate_ups)
        return grads.x_RD, grads.weights_R, grads.gate_up_EGD, grads.down_EDH, None


def _swiglu_backward(
    gate_up: Tensor, weights: Tensor, grad_act: Tensor, grad_weights_out: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Weighted activation and the gradient of the gate-up output; overwrites `grad_act`."""
    hidden = gate_up.shape[1] // 2
    gate, up = gate_up[:, :hidden], gate_up[:, hidden:]
    silu = F.silu(gate)
    act = silu * up
    if grad_weights_out is not None:
        torch.sum(act * grad_act, dim=1, out=grad_weights_out)
    act.mul_(weights.unsqueeze(1))
    grad_act.mul_(weights.unsqueeze(1))
    grad_gate_up = torch.empty_like(gate_up)
    torch.mul(grad_act, silu, out=grad_gate_up[:, hidden:])
    grad_silu = grad_act.mul_(up)
    torch.ops.aten.silu_backward.grad_input(grad_silu, gate, grad_input=grad_gate_up[:, :hidden])
    return act, grad_gate_up


@dataclass(frozen=True, slots=True)
class _Gradients:
    """The gradients that are wanted, allocated once and filled expert by expert."""

    x_RD: Tensor | None
    weights_R: Tensor | None
    gate_up_EGD: Tensor | None
    down_EDH: Tensor | None

    @staticmethod
    def allocate(needed: Sequence[bool], *tensors: Tensor) -> "_Gradients":
        pairs = zip(needed, tensors, strict=False)
        return _Gradients(*(torch.empty_like(t) if need else None for need, t in pairs))

    def weights_of(self, rows: slice) -> Tensor | None:
        return None if self.weights_R is None else self.weights_R[rows]

    def zero_empty(self, num_tokens_per_expert: Sequence[int]) -> None:
        for grad in (self.gate_up_EGD, self.down_EDH):
            if grad is not None:
                for expert, count in enumerate(num_tokens_per_expert):
                    if count == 0:
                        grad[expert].zero_()

    def write_down(self, block: _Block, grad_ys: Sequence[Tensor], acts: Sequence[Tensor]) -> None:
        if self.down_EDH is not None:
            for expert, grad_y, act in zip(block.experts, grad_ys, acts, strict=True):
                torch.mm(grad_y.t(), act, out=self.down_EDH[expert])

    def write_gate_up(
        self, block: _Block, grad_gate_ups: Sequence[Tensor], xs: Sequence[Tensor]
    ) -> None:
        if self.gate_up_EGD is not None:
            for expert, grad, x in zip(block.experts, grad_gate_ups, xs, strict=True):
                torch.mm(grad.t(), x, out=self.gate_up_EGD[expert])

    def write_x(
        self, block: _Block, grad_gate_ups: Sequence[Tensor], gate_ups: Sequence[Tensor]
    ) -> None:
        if self.x_RD is not None:
            outs = self.x_RD[block.start : block.end].split(list(block.counts))
            for expert, grad, out in zip(block.experts, grad_gate_ups, outs, strict=True):
                torch.mm(grad, gate_ups[expert], out=out)
