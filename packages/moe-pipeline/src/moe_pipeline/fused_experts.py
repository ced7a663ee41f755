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
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

# Elements of a block's [rows, H] intermediate: a handful of them in fp32 stay inside a 1 MiB L2.
_CPU_BLOCK_ELEMENTS = 1 << 16

Span = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class _Block:
    """Neighbouring experts that are worked on together: rows [start, end) and who owns which."""

    start: int
    end: int
    spans: tuple[Span, ...]  # (expert, first row, end row), only experts with rows


def _blocks(num_tokens_per_expert: Sequence[int], max_rows: int) -> Iterator[_Block]:
    start = end = 0
    spans: list[Span] = []
    for expert, count in enumerate(num_tokens_per_expert):
        if spans and end - start + count > max_rows:
            yield _Block(start, end, tuple(spans))
            start, spans = end, []
        if count:
            spans.append((expert, end, end + count))
            end += count
    if spans:
        yield _Block(start, end, tuple(spans))


def _max_rows(x_RD: Tensor, intermediate_size: int) -> int:
    if x_RD.device.type != "cpu":
        return max(1, x_RD.shape[0])
    return max(1, _CPU_BLOCK_ELEMENTS // intermediate_size)


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
        for block in _blocks(num_tokens_per_expert, _max_rows(x_RD, hidden)):
            for expert, start, end in block.spans:
                torch.mm(x_RD[start:end], gate_up_EGD[expert].t(), out=gate_up_RG[start:end])
            rows = slice(block.start, block.end)
            act = F.silu(gate_up_RG[rows, :hidden])
            act.mul_(gate_up_RG[rows, hidden:]).mul_(weights_R[rows].unsqueeze(1))
            for expert, start, end in block.spans:
                first, last = start - block.start, end - block.start
                torch.mm(act[first:last], down_EDH[expert].t(), out=y_RD[start:end])
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
        hidden = down_EDH.shape[2]
        for block in _blocks(ctx.num_tokens_per_expert, _max_rows(x_RD, hidden)):
            rows = slice(block.start, block.end)
            grad_act = x_RD.new_empty(block.end - block.start, hidden)
            for expert, start, end in block.spans:
                first, last = start - block.start, end - block.start
                torch.mm(grad_y_RD[start:end], down_EDH[expert], out=grad_act[first:last])
            act, grad_gate_up = _swiglu_backward(
                gate_up_RG[rows], weights_R[rows], grad_act, grads.weights_of(rows)
            )
            for span in block.spans:
                local = slice(span[1] - block.start, span[2] - block.start)
                grads.add_expert(span, x_RD, grad_y_RD, act[local], grad_gate_up[local])
                if grads.x_RD is not None:
                    torch.mm(
                        grad_gate_up[local], gate_up_EGD[span[0]], out=grads.x_RD[span[1] : span[2]]
                    )
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
        made = [
            torch.empty_like(t) if need else None for need, t in zip(needed, tensors, strict=False)
        ]
        return _Gradients(*made)

    def weights_of(self, rows: slice) -> Tensor | None:
        return None if self.weights_R is None else self.weights_R[rows]

    def zero_empty(self, num_tokens_per_expert: Sequence[int]) -> None:
        for grad in (self.gate_up_EGD, self.down_EDH):
            if grad is not None:
                for expert, count in enumerate(num_tokens_per_expert):
                    if count == 0:
                        grad[expert].zero_()

    def add_expert(
        self, span: Span, x_RD: Tensor, grad_y_RD: Tensor, act: Tensor, grad_gate_up: Tensor
    ) -> None:
        expert, start, end = span
        if self.gate_up_EGD is not None:
            torch.mm(grad_gate_up.t(), x_RD[start:end], out=self.gate_up_EGD[expert])
        if self.down_EDH is not None:
            torch.mm(grad_y_RD[start:end].t(), act, out=self.down_EDH[expert])
