"""All experts as one autograd function: little saved, little copied.

Plain autograd saves, for each routed row, the input, the gate-up output, the activated gate, the
product and the unweighted output, and makes a weight gradient by summing per-expert pieces. This
function saves the input, the gate-up output and the router weights only; everything else is cheap
to compute again. Further points make it fast:

- router weights multiply the activation (H wide) before the down projection instead of the output
  (D wide) after it, which is the same number: `w * (W a + b) = W (w * a) + w * b`;
- each weight gradient is one tensor into which the experts' products are written in place; an
  expert without rows gets zeros there and no product. With `ExpertWeights.grad_buffers` that tensor
  is the weight's `grad` itself;
- given tokens instead of rows, it gathers a block's rows when it needs them, in the backward again:
  k choices of a token save it once;
- what is computed again is held for a block of neighbouring experts at a time, and the elementwise
  work on it runs on pieces that fit in the cache; for half precision in fp32, rounded once.

The gradient is not itself differentiable: use the `loop` implementation for second derivatives.

Dims: R routed rows sorted by expert, S the R rows or T tokens that it is given, K choices of a
token, D width of a row, H intermediate, E local experts, G = 2H (H without a gate).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_pipeline.activations import Activation, compute_dtype
from moe_pipeline.expert_order import ExpertOrder
from moe_pipeline.expert_weights import ExpertWeights
from moe_pipeline.grad_buffers import GradBuffers, GradTarget

# Elements of a block's [rows, H] intermediate. It bounds the memory of what is computed again; each
# block costs some Python, which is slow between products that have emptied the cache.
_CPU_BLOCK_ELEMENTS = 1 << 21
_OTHER_BLOCK_ELEMENTS = 1 << 24

_WEIGHT_NAMES = ("gate_up_EGD", "down_EDH", "gate_up_bias_EG", "down_bias_ED")


class _Spec(NamedTuple):
    """What `FusedExperts` needs to know besides its tensors."""

    num_tokens_per_expert: tuple[int, ...]
    num_choices: int  # of each token, where it is given tokens
    activation: Activation
    grad_buffers: GradBuffers | None
    # The weights themselves: hooks on saved tensors, such as recompute's, give back others.
    leaves: tuple[Tensor | None, ...]

    def kept_target(self, index: int) -> GradTarget | None:
        """The `grad` of a weight, if gradients go straight there."""
        leaf = self.leaves[index] if self.leaves else None
        if self.grad_buffers is None or leaf is None or not self.grad_buffers.serves(leaf):
            return None
        return self.grad_buffers.target(_WEIGHT_NAMES[index], leaf)


def fused_experts(
    x_RD: Tensor,
    weights_R: Tensor,
    weights: ExpertWeights,
    num_tokens_per_expert: tuple[int, ...],
    activation: Activation,
) -> Tensor:
    """`FusedExperts` on sorted rows; see `moe_pipeline.experts.experts_function`."""
    spec = _Spec(num_tokens_per_expert, 0, activation, weights.grad_buffers, _leaves(weights))
    return _apply(spec, None, x_RD, weights_R, weights)


def fused_token_experts(
    x_TD: Tensor,
    weights_TK: Tensor,
    weights: ExpertWeights,
    order: ExpertOrder,
    activation: Activation,
) -> Tensor:
    """`FusedExperts` on tokens, of which no row is saved; see `moe_pipeline.token_experts`."""
    counts, num_choices = order.num_tokens_per_expert, weights_TK.shape[1]
    spec = _Spec(counts, num_choices, activation, weights.grad_buffers, _leaves(weights))
    weights_R = weights_TK.reshape(-1).index_select(0, order.choice_R)
    return _apply(spec, order.choice_R, x_TD, weights_R, weights)


def _apply(
    spec: _Spec, order_R: Tensor | None, x: Tensor, weights_R: Tensor, weights: ExpertWeights
) -> Tensor:
    return FusedExperts.apply(  # type: ignore[no-any-return]
        spec,
        order_R,
        x.contiguous(),
        weights_R.to(compute_dtype(x.dtype)),
        *_tensors(weights),
    )


def _tensors(weights: ExpertWeights) -> tuple[Tensor | None, ...]:
    return (
        weights.gate_up_EGD,
        weights.down_EDH,
        weights.gate_up_bias_EG,
        weights.down_bias_ED,
    )


def _leaves(weights: ExpertWeights) -> tuple[Tensor | None, ...]:
    return () if weights.grad_buffers is None else _tensors(weights)


class _Block(NamedTuple):
    """Neighbouring experts that are worked on together: rows [start, end) and who owns which."""

    start: int
    end: int
    experts: tuple[int, ...]  # only those with rows
    counts: tuple[int, ...]  # rows of each of them

    def of(self, rows: Tensor) -> Tensor:
        """The block's part of a tensor of all rows."""
        return rows[self.start : self.end]

    def each(self, *rows: Tensor) -> Iterator[tuple[Any, ...]]:
        """(expert, its part of each tensor) for tensors of the block's rows."""
        return zip(self.experts, *(r.split(self.counts) for r in rows), strict=True)

    def products(self, rows: Tensor, weights: Sequence[Tensor], out: Tensor) -> None:
        """Each expert's rows times its weight, into its part of `out`."""
        # Between two products all else is out of the cache, and every line of Python counts: one
        # split for all experts costs a fraction of as many slices.
        mine = [weights[expert] for expert in self.experts]
        pieces = zip(rows.split(self.counts), mine, out.split(self.counts), strict=True)
        for row, weight, to in pieces:
            torch.mm(row, weight, out=to)

    def outer_products(self, target: GradTarget | None, left: Tensor, right: Tensor) -> None:
        """Each expert's `left.t() @ right`, where it is wanted."""
        if target is not None:
            lefts = left.t().split(self.counts, dim=1)
            target.write(self.experts, lefts, right.split(self.counts))


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
    on_cpu = x_RD.device.type == "cpu"
    elements = _CPU_BLOCK_ELEMENTS if on_cpu else _OTHER_BLOCK_ELEMENTS
    return max(1, elements // max(1, intermediate_size))


@final
class FusedExperts(torch.autograd.Function):
    """`weight * (down(act(gate_up(x))) + bias)` for all experts; see the module's docstring."""

    @staticmethod
    def forward(
        ctx: Any, spec: _Spec, order_R: Tensor | None, x_SD: Tensor, *others: Any
    ) -> Tensor:
        """Rows sorted by expert in, weighted rows out; with `order_R` tokens in and tokens out.

        `others`: router weights [R], gate_up_EGD, down_EDH and their biases or None.
        """
        weights_R, gate_up_EGD, down_EDH, gate_up_bias_EG, down_bias_ED = others
        way = _Way.of(order_R, x_SD.shape[0], spec)
        gate_up_RG = x_SD.new_empty(weights_R.shape[0], gate_up_EGD.shape[1])
        y_RD = way.new_rows(x_SD, weights_R.shape[0])
        gate_up_EDG, down_EHD = gate_up_EGD.mT.unbind(), down_EDH.mT.unbind()
        for block in _blocks(spec.num_tokens_per_expert, _max_rows(x_SD, down_EDH.shape[2])):
            gate_up, weights = block.of(gate_up_RG), block.of(weights_R)
            block.products(way.rows(block, x_SD), gate_up_EDG, gate_up)
            if gate_up_bias_EG is not None:
                for expert, out in block.each(gate_up):
                    out.add_(gate_up_bias_EG[expert])
            act = spec.activation.weighted(gate_up, weights)
            block.products(act, down_EHD, block.of(y_RD))
            if down_bias_ED is not None:
                for expert, w, out in block.each(weights.to(y_RD.dtype), block.of(y_RD)):
                    out.addr_(w, down_bias_ED[expert])
        trains_gate_up = ctx.needs_input_grad[4]
        ctx.save_for_backward(
            order_R, x_SD if trains_gate_up else None, weights_R, gate_up_RG, *others[1:]
        )
        ctx.spec, ctx.num_sources = spec, x_SD.shape[0]
        return way.back(y_RD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of rows or tokens, router weights, projections and biases."""
        # Read once: under recompute a second reading raises.
        order_R, x_SD, weights_R, gate_up_RG, *weights_E = ctx.saved_tensors
        gate_up_EGD, down_EDH, _, down_bias_ED = weights_E
        spec: _Spec = ctx.spec
        grad_out = grad_out.contiguous()
        way = _Way.of(order_R, ctx.num_sources, spec)
        grads = _Gradients.allocate(ctx, way, grad_out, (weights_R, *weights_E))
        gate_ups, downs = gate_up_EGD.unbind(), down_EDH.unbind()
        for block in _blocks(spec.num_tokens_per_expert, _max_rows(grad_out, down_EDH.shape[2])):
            grad_y, weights = way.rows(block, grad_out), block.of(weights_R)
            grad_act = grad_y.new_empty(grad_y.shape[0], down_EDH.shape[2])
            block.products(grad_y, downs, grad_act)
            grad_weights = None if grads.weights_R is None else block.of(grads.weights_R)
            act, grad_gate_up = spec.activation.backward(
                block.of(gate_up_RG), weights, grad_act, grad_weights
            )
            block.outer_products(grads.down, grad_y, act)
            if grads.gate_up is not None:
                block.outer_products(grads.gate_up, grad_gate_up, way.rows(block, x_SD))
            if grads.x_RD is not None:
                block.products(grad_gate_up, gate_ups, block.of(grads.x_RD))
            grads.write_biases(block, grad_gate_up, grad_y, weights)
            if grad_weights is not None and down_bias_ED is not None:
                for expert, g, out in block.each(grad_y, grad_weights):
                    out.addmv_(g.to(out.dtype), down_bias_ED[expert].to(out.dtype))
        grad_x = None if grads.x_RD is None else way.back(grads.x_RD)
        return (None, None, grad_x, *grads.of_weights())


class _Way(NamedTuple):
    """How tokens become rows and rows become tokens; without an order rows stay rows."""

    token_R: Tensor | None  # whose token each row is
    row_SK: Tensor | None  # where each choice of a token went; R: nowhere

    @staticmethod
    def of(order_R: Tensor | None, num_sources: int, spec: _Spec) -> "_Way":
        if order_R is None:
            return _Way(None, None)
        rows = order_R.shape[0]
        row_SK = order_R.new_full((num_sources * spec.num_choices,), rows)
        row_SK[order_R] = torch.arange(rows, device=order_R.device)
        token_R = order_R.div(max(1, spec.num_choices), rounding_mode="floor")
        return _Way(token_R, row_SK.view(num_sources, spec.num_choices))

    def rows(self, block: _Block, sources: Tensor) -> Tensor:
        """The block's rows of tokens, or of rows."""
        if self.token_R is None:
            return block.of(sources)
        return sources.index_select(0, block.of(self.token_R))

    def new_rows(self, like: Tensor, num_rows: int) -> Tensor:
        """Memory for all rows, to be given to `back` when they are written."""
        if self.row_SK is None:
            return like.new_empty(num_rows, like.shape[1])
        # One more row, of zeros, for choices that went nowhere.
        rows = like.new_empty(num_rows + 1, like.shape[1])
        rows[num_rows].zero_()
        return rows

    def back(self, rows: Tensor) -> Tensor:
        """Each token's sum over its choices, in their order and in fp32 for half precision."""
        if self.row_SK is None:
            return rows
        if self.row_SK.numel() == 0:
            return rows.new_zeros(self.row_SK.shape[0], rows.shape[1])
        return F.embedding_bag(self.row_SK, rows, mode="sum")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gradients:
    """The gradients that are wanted: allocated once, or found, and filled expert by expert."""

    x_RD: Tensor | None
    weights_R: Tensor | None
    gate_up: GradTarget | None
    down: GradTarget | None
    gate_up_bias: GradTarget | None
    down_bias: GradTarget | None
    through_autograd: tuple[bool, ...]  # of the four targets

    @staticmethod
    def allocate(ctx: Any, way: _Way, grad_out: Tensor, saved: Sequence[Tensor]) -> "_Gradients":
        """`saved`: router weights, projections and biases."""
        spec: _Spec = ctx.spec
        needs_x, needs_weights, *needs = ctx.needs_input_grad[2:]
        targets: list[GradTarget | None] = [None] * len(needs)
        through_autograd = [False] * len(needs)
        empty = [e for e, count in enumerate(spec.num_tokens_per_expert) if count == 0]
        for i, need in enumerate(needs):
            if need:
                target = spec.kept_target(i)
                through_autograd[i] = target is None
                if target is None:
                    target = GradTarget(torch.empty_like(saved[1 + i]), False)
                target.zero(empty)
                targets[i] = target
        gate_up, down, gate_up_bias, down_bias = targets
        return _Gradients(
            x_RD=way.new_rows(grad_out, saved[0].shape[0]) if needs_x else None,
            weights_R=torch.empty_like(saved[0]) if needs_weights else None,
            gate_up=gate_up,
            down=down,
            gate_up_bias=gate_up_bias,
            down_bias=down_bias,
            through_autograd=tuple(through_autograd),
        )

    def write_biases(
        self, block: _Block, grad_gate_up: Tensor, grad_y: Tensor, weights: Tensor
    ) -> None:
        if self.gate_up_bias is not None:
            for expert, g in block.each(grad_gate_up):
                self.gate_up_bias.write_sum(expert, g.sum(0, dtype=weights.dtype))
        if self.down_bias is not None:
            for expert, g, w in block.each(grad_y, weights):
                self.down_bias.write_sum(expert, (g * w.unsqueeze(1)).sum(0))

    def of_weights(self) -> tuple[Tensor | None, ...]:
        """Of router weights, projections and biases; None where autograd has nothing to add."""
        targets = (self.gate_up, self.down, self.gate_up_bias, self.down_bias)
        weights = (
            target.grad if target is not None and through else None
            for target, through in zip(targets, self.through_autograd, strict=True)
        )
        return (self.weights_R, *weights)
