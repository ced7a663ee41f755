"""All experts as one autograd function: little saved, little copied.

It saves the input, the gate-up output and the router weights only; what else autograd would save is
cheap to compute again. Further points make it fast:

- router weights multiply the activation (H wide) before the down projection instead of the output
  (D wide) after it, which is the same number: `w * (W a + b) = W (w * a) + w * b`;
- each weight gradient is one tensor into which the experts' products are written in place; an
  expert without rows gets zeros there and no product. With `ExpertWeights.accumulation` that tensor
  is the weight's `grad` itself;
- given tokens instead of rows, it gathers a chunk's rows when it needs them, in the backward again:
  k choices of a token save it once;
- what is computed again is held for a chunk of neighbouring experts at a time, and the elementwise
  work on it runs on pieces that fit in the cache; for half precision in fp32, rounded once.

The gradient is not itself differentiable: use the `loop` implementation for second derivatives.
Deferred weight gradients (`moe_pipeline.weight_grad.store`) keep the gradient of the
gate-up output and the weighted activation until then, so that no product is repeated.

Dims: R routed rows sorted by expert, S the R rows or T tokens that it is given, K choices of a
token, D width of a row, H intermediate, E local experts, G = 2H (H without a gate).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_pipeline.experts.activations import Activation, compute_dtype
from moe_pipeline.experts.chunks import ExpertChunk, Permutation, expert_chunks, max_rows
from moe_pipeline.experts.order import ExpertOrder
from moe_pipeline.experts.weights import ExpertWeights
from moe_pipeline.weight_grad import (
    DeferredWeightGrad,
    GradTarget,
    accumulated,
    defer,
    deferrable,
)


class _Spec(NamedTuple):
    """What `FusedExperts` needs to know besides its tensors."""

    num_tokens_per_expert: tuple[int, ...]
    num_choices: int  # of each token, where it is given tokens
    activation: Activation
    # Of both projections and their biases. They hold the weights themselves: hooks on saved
    # tensors, such as recompute's, give back others.
    deferred: tuple[DeferredWeightGrad | None, ...]

    def is_deferred(self, index: int) -> bool:
        """Whether a weight's gradient is not computed by the backward that runs now."""
        deferred = self.deferred[index]
        return deferred is not None and deferred.is_deferring

    def target(self, index: int, like: Tensor) -> GradTarget:
        """Where a weight's gradient is put, completed for empty experts."""
        deferred = self.deferred[index]
        target = None if deferred is None else deferred.target()
        if target is None:
            target = GradTarget(torch.empty_like(like), False, in_place=False)
        target.zero([e for e, count in enumerate(self.num_tokens_per_expert) if count == 0])
        return target


def fused_experts(
    x_RD: Tensor,
    weights_R: Tensor,
    weights: ExpertWeights,
    num_tokens_per_expert: tuple[int, ...],
    activation: Activation,
) -> Tensor:
    """`FusedExperts` on sorted rows; see `moe_pipeline.experts.compute.experts_function`."""
    tensors, deferred = _deferrable(weights)
    spec = _Spec(num_tokens_per_expert, 0, activation, deferred)
    return _apply(spec, None, x_RD, weights_R, tensors)


def fused_token_experts(
    x_TD: Tensor,
    weights_TK: Tensor,
    weights: ExpertWeights,
    order: ExpertOrder,
    activation: Activation,
) -> Tensor:
    """`FusedExperts` on tokens, of which no row is saved; see `token_experts`."""
    tensors, deferred = _deferrable(weights)
    spec = _Spec(order.num_tokens_per_expert, weights_TK.shape[1], activation, deferred)
    weights_R = weights_TK.reshape(-1).index_select(0, order.choice_R)
    return _apply(spec, order.choice_R, x_TD, weights_R, tensors)


def _apply(
    spec: _Spec,
    order_R: Tensor | None,
    x: Tensor,
    weights_R: Tensor,
    tensors: Sequence[Tensor | None],
) -> Tensor:
    return FusedExperts.apply(  # type: ignore[no-any-return]
        spec,
        order_R,
        x.contiguous(),
        weights_R.to(compute_dtype(x.dtype)),
        *tensors,
    )


def _deferrable(
    weights: ExpertWeights,
) -> tuple[Sequence[Tensor | None], tuple[DeferredWeightGrad | None, ...]]:
    """Projections and biases as `FusedExperts` is given them; gradients of biases never wait."""
    accumulation = weights.accumulation
    found = [deferrable(w, accumulation) for w in (weights.gate_up_EGD, weights.down_EDH)]
    biases = (weights.gate_up_bias_EG, weights.down_bias_ED)
    none = (None, None)
    tensors, deferred = zip(
        *found, *(none if b is None else accumulated(b, accumulation) for b in biases), strict=True
    )
    return tensors, deferred


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
        permutation = Permutation.of(order_R, x_SD.shape[0], spec.num_choices)
        gate_up_RG = x_SD.new_empty(weights_R.shape[0], gate_up_EGD.shape[1])
        y_RD = permutation.new_rows(x_SD, weights_R.shape[0])
        gate_up_EDG, down_EHD = gate_up_EGD.mT.unbind(), down_EDH.mT.unbind()
        for chunk in expert_chunks(spec.num_tokens_per_expert, max_rows(x_SD, down_EDH.shape[2])):
            gate_up, weights = chunk.slice(gate_up_RG), chunk.slice(weights_R)
            chunk.products(permutation.permute(chunk, x_SD), gate_up_EDG, gate_up)
            if gate_up_bias_EG is not None:
                for expert, out in chunk.split(gate_up):
                    out.add_(gate_up_bias_EG[expert])
            act = spec.activation.weighted(gate_up, weights)
            chunk.products(act, down_EHD, chunk.slice(y_RD))
            if down_bias_ED is not None:
                for expert, w, out in chunk.split(weights.to(y_RD.dtype), chunk.slice(y_RD)):
                    out.addr_(w, down_bias_ED[expert])
        trains_gate_up = ctx.needs_input_grad[4]
        ctx.save_for_backward(
            order_R, x_SD if trains_gate_up else None, weights_R, gate_up_RG, *others[1:]
        )
        ctx.spec, ctx.num_sources = spec, x_SD.shape[0]
        return permutation.unpermute(y_RD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of rows or tokens, router weights, projections and biases."""
        # Read once: under recompute a second reading raises.
        order_R, x_SD, weights_R, gate_up_RG, *weights_E = ctx.saved_tensors
        gate_up_EGD, down_EDH, _, down_bias_ED = weights_E
        spec: _Spec = ctx.spec
        grad_out = grad_out.contiguous()
        permutation = Permutation.of(order_R, ctx.num_sources, spec.num_choices)
        grads = _Gradients.allocate(ctx, permutation, grad_out, (weights_R, *weights_E))
        gate_up_target, down_target = grads.targets[:2]
        gate_ups, downs = gate_up_EGD.unbind(), down_EDH.unbind()
        later = _Later.of(spec)
        for chunk in expert_chunks(
            spec.num_tokens_per_expert, max_rows(grad_out, down_EDH.shape[2])
        ):
            grad_y, weights = permutation.permute(chunk, grad_out), chunk.slice(weights_R)
            grad_act = grad_y.new_empty(grad_y.shape[0], down_EDH.shape[2])
            chunk.products(grad_y, downs, grad_act)
            grad_weights = None if grads.weights_R is None else chunk.slice(grads.weights_R)
            act, grad_gate_up = spec.activation.backward(
                chunk.slice(gate_up_RG), weights, grad_act, grad_weights
            )
            later.keep(chunk, act, grad_gate_up)
            chunk.outer_products(down_target, grad_y, act)
            if gate_up_target is not None:
                chunk.outer_products(gate_up_target, grad_gate_up, permutation.permute(chunk, x_SD))
            if grads.x_RD is not None:
                chunk.products(grad_gate_up, gate_ups, chunk.slice(grads.x_RD))
            grads.write_biases(chunk, grad_gate_up, grad_y, weights)
            if grad_weights is not None and down_bias_ED is not None:
                for expert, g, out in chunk.split(grad_y, grad_weights):
                    out.addmv_(g.to(out.dtype), down_bias_ED[expert].to(out.dtype))
        later.defer(permutation, x_SD, grad_out)
        grad_x = None if grads.x_RD is None else permutation.unpermute(grads.x_RD)
        return (None, None, grad_x, *grads.of_weights())


class _Later(NamedTuple):
    """What the products of deferred weight gradients need, chunk by chunk."""

    spec: _Spec
    chunks: list[ExpertChunk]
    acts: list[Tensor] | None  # None: not deferred
    grads_gate_up: list[Tensor] | None

    @staticmethod
    def of(spec: _Spec) -> "_Later":
        """Empty, for the backward that runs now."""
        gate_up, down = spec.is_deferred(0), spec.is_deferred(1)
        return _Later(spec, [], [] if down else None, [] if gate_up else None)

    def keep(self, chunk: ExpertChunk, act: Tensor, grad_gate_up: Tensor) -> None:
        """The chunk's activation and gradient, as far as they are needed later."""
        self.chunks.append(chunk)
        if self.acts is not None:
            self.acts.append(act)
        if self.grads_gate_up is not None:
            self.grads_gate_up.append(grad_gate_up)

    def defer(self, permutation: "Permutation", x_SD: Tensor | None, grad_out: Tensor) -> None:
        """Leave the products that were not computed to the store."""
        order = () if permutation.token_R is None else (permutation.token_R,)
        given = (x_SD, self.grads_gate_up), (grad_out, self.acts)
        for index, (sources, factors) in enumerate(given):
            deferred = self.spec.deferred[index]
            if deferred is not None and sources is not None and factors is not None:
                work = partial(_products_later, self.spec, index, deferred.weight, self.chunks)
                defer(deferred, work, sources, *factors, *order)


def _products_later(
    spec: _Spec, index: int, weight: Tensor, chunks: Sequence[ExpertChunk], *held: Tensor
) -> Tensor | None:
    """The gradient of one projection; None if it was accumulated in place.

    `held`: what rows are taken from, the other factor for each chunk, and whose row is whose.
    """
    sources, factors, order = held[0], held[1 : 1 + len(chunks)], held[1 + len(chunks) :]
    permutation = Permutation(order[0] if order else None, None)
    target = spec.target(index, weight)
    for chunk, factor in zip(chunks, factors, strict=True):
        rows = permutation.permute(chunk, sources)
        left, right = (rows, factor) if index else (factor, rows)
        chunk.outer_products(target, left, right)
    return target.returned


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gradients:
    """The gradients that are wanted: allocated once, or found, and filled expert by expert."""

    x_RD: Tensor | None
    weights_R: Tensor | None
    targets: list[GradTarget | None]  # of gate_up, down and their biases

    @staticmethod
    def allocate(
        ctx: Any, permutation: Permutation, grad_out: Tensor, saved: Sequence[Tensor]
    ) -> "_Gradients":
        """`saved`: router weights, projections and biases."""
        spec: _Spec = ctx.spec
        needs_x, needs_weights, *needs = ctx.needs_input_grad[2:]
        return _Gradients(
            x_RD=permutation.new_rows(grad_out, saved[0].shape[0]) if needs_x else None,
            weights_R=torch.empty_like(saved[0]) if needs_weights else None,
            targets=[
                spec.target(i, saved[1 + i]) if need and not spec.is_deferred(i) else None
                for i, need in enumerate(needs)
            ],
        )

    def write_biases(
        self, chunk: ExpertChunk, grad_gate_up: Tensor, grad_y: Tensor, weights: Tensor
    ) -> None:
        gate_up_bias, down_bias = self.targets[2:]
        if gate_up_bias is not None:
            for expert, g in chunk.split(grad_gate_up):
                gate_up_bias.write_sum(expert, g.sum(0, dtype=weights.dtype))
        if down_bias is not None:
            for expert, g, w in chunk.split(grad_y, weights):
                down_bias.write_sum(expert, (g * w.unsqueeze(1)).sum(0))

    def of_weights(self) -> tuple[Tensor | None, ...]:
        """Of router weights, projections and biases; None where autograd has nothing to add."""
        found = (None if target is None else target.returned for target in self.targets)
        return (self.weights_R, *found)
