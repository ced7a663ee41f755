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
Weight gradients that are put off (`moe_pipeline.weight_grad.store`) keep the gradient of the
gate-up output and the weighted activation until then, so that no product is repeated.

Dims: R routed rows sorted by expert, S the R rows or T tokens that it is given, K choices of a
token, D width of a row, H intermediate, E local experts, G = 2H (H without a gate).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_pipeline.experts.activations import Activation, compute_dtype
from moe_pipeline.experts.chunks import Block, Way, blocks, max_rows
from moe_pipeline.experts.order import ExpertOrder
from moe_pipeline.experts.weights import ExpertWeights
from moe_pipeline.weight_grad import GradBuffers, GradTarget, WeightToken, put_off, splittable

_WEIGHT_NAMES = ("gate_up_EGD", "down_EDH", "gate_up_bias_EG", "down_bias_ED")


class _Spec(NamedTuple):
    """What `FusedExperts` needs to know besides its tensors."""

    num_tokens_per_expert: tuple[int, ...]
    num_choices: int  # of each token, where it is given tokens
    activation: Activation
    grad_buffers: GradBuffers | None
    # The weights themselves: hooks on saved tensors, such as recompute's, give back others.
    leaves: tuple[Tensor | None, ...]
    tokens: tuple[WeightToken | None, WeightToken | None]  # of both projections

    def is_put_off(self, index: int) -> bool:
        """Whether a weight's gradient is not computed by the backward that runs now."""
        token = dict(enumerate(self.tokens)).get(index)
        return token is not None and token.is_deferring

    def target(self, index: int, like: Tensor) -> tuple[GradTarget, bool]:
        """Where a weight's gradient is put, completed for empty experts; whether it is kept."""
        kept = self.kept_target(index)
        target = GradTarget(torch.empty_like(like), False) if kept is None else kept
        target.zero([e for e, count in enumerate(self.num_tokens_per_expert) if count == 0])
        return target, kept is not None

    def kept_target(self, index: int) -> GradTarget | None:
        """The `grad` of a weight, if gradients go straight there."""
        token = dict(enumerate(self.tokens)).get(index)
        grad = None if token is None else token.open_grad()
        if grad is not None:
            return GradTarget(grad, True)
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
    """`FusedExperts` on sorted rows; see `moe_pipeline.experts.compute.experts_function`."""
    spec, aliases = _specified(num_tokens_per_expert, 0, activation, weights)
    return _apply(spec, None, x_RD, weights_R, aliases)


def fused_token_experts(
    x_TD: Tensor,
    weights_TK: Tensor,
    weights: ExpertWeights,
    order: ExpertOrder,
    activation: Activation,
) -> Tensor:
    """`FusedExperts` on tokens, of which no row is saved; see `token_experts`."""
    counts, num_choices = order.num_tokens_per_expert, weights_TK.shape[1]
    spec, aliases = _specified(counts, num_choices, activation, weights)
    weights_R = weights_TK.reshape(-1).index_select(0, order.choice_R)
    return _apply(spec, order.choice_R, x_TD, weights_R, aliases)


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


def _specified(
    counts: tuple[int, ...], num_choices: int, activation: Activation, weights: ExpertWeights
) -> tuple[_Spec, ExpertWeights]:
    """What `FusedExperts` is told, and the weights that it is given."""
    gate_up_EGD, gate_up_token = splittable(weights.gate_up_EGD)
    down_EDH, down_token = splittable(weights.down_EDH)
    leaves = () if weights.grad_buffers is None else _tensors(weights)
    tokens = gate_up_token, down_token
    spec = _Spec(counts, num_choices, activation, weights.grad_buffers, leaves, tokens)
    if tokens != (None, None):
        weights = replace(weights, gate_up_EGD=gate_up_EGD, down_EDH=down_EDH)
    return spec, weights


def _tensors(weights: ExpertWeights) -> tuple[Tensor | None, ...]:
    return (
        weights.gate_up_EGD,
        weights.down_EDH,
        weights.gate_up_bias_EG,
        weights.down_bias_ED,
    )


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
        way = Way.of(order_R, x_SD.shape[0], spec.num_choices)
        gate_up_RG = x_SD.new_empty(weights_R.shape[0], gate_up_EGD.shape[1])
        y_RD = way.new_rows(x_SD, weights_R.shape[0])
        gate_up_EDG, down_EHD = gate_up_EGD.mT.unbind(), down_EDH.mT.unbind()
        for block in blocks(spec.num_tokens_per_expert, max_rows(x_SD, down_EDH.shape[2])):
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
        way = Way.of(order_R, ctx.num_sources, spec.num_choices)
        grads = _Gradients.allocate(ctx, way, grad_out, (weights_R, *weights_E))
        gate_ups, downs = gate_up_EGD.unbind(), down_EDH.unbind()
        later = _Later.of(spec)
        for block in blocks(spec.num_tokens_per_expert, max_rows(grad_out, down_EDH.shape[2])):
            grad_y, weights = way.rows(block, grad_out), block.of(weights_R)
            grad_act = grad_y.new_empty(grad_y.shape[0], down_EDH.shape[2])
            block.products(grad_y, downs, grad_act)
            grad_weights = None if grads.weights_R is None else block.of(grads.weights_R)
            act, grad_gate_up = spec.activation.backward(
                block.of(gate_up_RG), weights, grad_act, grad_weights
            )
            later.keep(block, act, grad_gate_up)
            block.outer_products(grads.down, grad_y, act)
            if grads.gate_up is not None:
                block.outer_products(grads.gate_up, grad_gate_up, way.rows(block, x_SD))
            if grads.x_RD is not None:
                block.products(grad_gate_up, gate_ups, block.of(grads.x_RD))
            grads.write_biases(block, grad_gate_up, grad_y, weights)
            if grad_weights is not None and down_bias_ED is not None:
                for expert, g, out in block.each(grad_y, grad_weights):
                    out.addmv_(g.to(out.dtype), down_bias_ED[expert].to(out.dtype))
        later.put_off(way, x_SD, grad_out)
        grad_x = None if grads.x_RD is None else way.back(grads.x_RD)
        return (None, None, grad_x, *grads.of_weights())


class _Later(NamedTuple):
    """What the products of put off weight gradients need, block by block."""

    spec: _Spec
    blocks: list[Block]
    acts: list[Tensor] | None  # None: not put off
    grads_gate_up: list[Tensor] | None

    @staticmethod
    def of(spec: _Spec) -> "_Later":
        """Empty, for the backward that runs now."""
        gate_up, down = spec.is_put_off(0), spec.is_put_off(1)
        return _Later(spec, [], [] if down else None, [] if gate_up else None)

    def keep(self, block: Block, act: Tensor, grad_gate_up: Tensor) -> None:
        """The block's activation and gradient, as far as they are needed later."""
        self.blocks.append(block)
        if self.acts is not None:
            self.acts.append(act)
        if self.grads_gate_up is not None:
            self.grads_gate_up.append(grad_gate_up)

    def put_off(self, way: "Way", x_SD: Tensor | None, grad_out: Tensor) -> None:
        """Leave the products that were not computed to their tokens."""
        order = () if way.token_R is None else (way.token_R,)
        given = (x_SD, self.grads_gate_up), (grad_out, self.acts)
        for index, (sources, factors) in enumerate(given):
            token = self.spec.tokens[index]
            if token is not None and sources is not None and factors is not None:
                work = partial(_products_later, self.spec, index, token.weight, self.blocks)
                put_off(token, work, sources, *factors, *order)


def _products_later(
    spec: _Spec, index: int, weight: Tensor, blocks: Sequence[Block], *held: Tensor
) -> Tensor | None:
    """The gradient of one projection; None if it went straight to the weight's `grad`.

    `held`: what rows are taken from, the other factor for each block, and whose row is whose.
    """
    sources, factors, order = held[0], held[1 : 1 + len(blocks)], held[1 + len(blocks) :]
    way = Way(order[0] if order else None, None)
    target, is_kept = spec.target(index, weight)
    for block, factor in zip(blocks, factors, strict=True):
        rows = way.rows(block, sources)
        left, right = (rows, factor) if index else (factor, rows)
        block.outer_products(target, left, right)
    return None if is_kept else target.grad


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
    def allocate(ctx: Any, way: Way, grad_out: Tensor, saved: Sequence[Tensor]) -> "_Gradients":
        """`saved`: router weights, projections and biases."""
        spec: _Spec = ctx.spec
        needs_x, needs_weights, *needs = ctx.needs_input_grad[2:]
        targets: list[GradTarget | None] = [None] * len(needs)
        through_autograd = [False] * len(needs)
        for i, need in enumerate(needs):
            if need and not spec.is_put_off(i):
                targets[i], is_kept = spec.target(i, saved[1 + i])
                through_autograd[i] = not is_kept
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
        self, block: Block, grad_gate_up: Tensor, grad_y: Tensor, weights: Tensor
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
