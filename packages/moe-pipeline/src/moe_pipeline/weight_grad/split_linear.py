"""Torch's linear functions with a weight gradient that can be deferred.

The same products as autograd's own backward, to the bit. What these functions cannot take (a weight
that is no leaf, subclasses of tensors, no grad mode) goes to torch's own, computed at once.

    REPLACEMENTS[F.linear]                              # used by moe_pipeline.weight_grad.store
    y_RN = looped_product(x_RK, weight_ENK, counts)

A function of torch saves its inputs before it computes, so that a forward which runs again for what
is saved stops ahead of the last product; one written in Python saves afterwards. So here, where
hooks wait for what is saved, the function returns a placeholder, which is filled afterwards.

Dims: N outputs, K inputs, R rows sorted by group, E groups.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_pipeline._torch_private import GROUPED_MM, saved_tensors_hooks_in_force
from moe_pipeline.weight_grad.accumulation import PLAIN_TYPES, add_product, product
from moe_pipeline.weight_grad.deferred import DeferredWeightGrad, Splitting, defer, deferrable

# Saved besides what is needed. A checkpoint that runs its second forward unsplit would else put
# what torch's functions save, such as a transposed weight, in the place of what these saved; so it
# counts too few tensors and raises its error.
_MARK = torch.empty(0, 3, dtype=torch.uint8)


def _linear(
    splitting: Splitting,
    function: Callable[..., Tensor],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    if _takes(input, weight):
        alias_NK, deferred = splitting.of(weight)
        if deferred is not None:
            return _split(
                lambda: function(input, alias_NK, bias), input, alias_NK, bias, deferred, False
            )
    return function(input, weight, bias)


def _matmul(
    splitting: Splitting, function: Callable[..., Tensor], input: Tensor, *others: Any, **named: Any
) -> Tensor:
    """`input @ weight` by the names of torch.matmul and torch.mm."""
    other = others[0] if others else named.get("other", named.get("mat2"))
    plain = len(others) + len(named) == 1
    if plain and isinstance(other, Tensor) and _takes(input, other):
        alias_KN, deferred = splitting.of(other)
        if deferred is not None:
            return _split(lambda: function(input, alias_KN), input, alias_KN, None, deferred, True)
    return function(input, *others, **named)


def _addmm(
    splitting: Splitting, function: Callable[..., Tensor], *others: Any, **named: Any
) -> Tensor:
    """`bias + mat1 @ mat2` with a bias for each column, as GPT-2's layers call it."""
    if len(others) == 3 and not named and _takes(*others[1:]):
        bias, mat1, mat2 = others
        if type(bias) in PLAIN_TYPES and bias.shape == mat2.shape[1:]:
            alias_KN, deferred = splitting.of(mat2)
            if deferred is not None:
                return _split(
                    lambda: function(bias, mat1, alias_KN), mat1, alias_KN, bias, deferred, True
                )
    return function(*others, **named)


def _grouped_mm(
    splitting: Splitting,
    function: Callable[..., Tensor],
    mat_a: Tensor,
    mat_b: Tensor,
    *others: Any,
    **named: Any,
) -> Tensor:
    """Rows [R, K] by a stacked weight [E, K, N]."""
    named |= zip(("offs", "bias", "out_dtype"), others, strict=False)
    offsets = named.get("offs")
    plain = all(value is None for name, value in named.items() if name != "offs")
    if plain and offsets is not None and mat_a.dim() == 2 and mat_b.dim() == 3:
        alias_EKN, deferred = splitting.of(mat_b)
        if deferred is not None and type(mat_a) in PLAIN_TYPES:
            return _computed(
                lambda: function(mat_a, alias_EKN, offs=offsets),
                lambda now: _SplitGroupedMM.apply(mat_a, alias_EKN, offsets, deferred, now),
            )
    return function(mat_a, mat_b, **named)


REPLACEMENTS: Mapping[Callable[..., Any], Callable[..., Tensor]] = {
    F.linear: _linear,
    torch.matmul: _matmul,
    torch.mm: _matmul,
    Tensor.matmul: _matmul,
    Tensor.mm: _matmul,
    Tensor.__matmul__: _matmul,
    torch.addmm: _addmm,
    GROUPED_MM: _grouped_mm,
}


def _takes(x: Tensor, weight: Tensor) -> bool:
    return (
        type(x) in PLAIN_TYPES
        and x.layout == torch.strided
        and not x.is_nested
        and weight.dim() == 2
        and weight.numel() > 0
        and x.dim() >= 1
        and weight.is_floating_point()
        and x.is_floating_point()
    )


_Compute = Callable[[], Tensor]


def _computed(compute: _Compute, apply: Callable[[_Compute | None], Tensor]) -> Tensor:
    """What `apply` makes of `compute`: called within it or, where hooks wait, after it.

    `apply(None)` returns a placeholder with its place in the graph.
    """
    if saved_tensors_hooks_in_force() is None:
        return apply(compute)
    placeholder = apply(None)
    with torch.no_grad():
        placeholder.data = compute()
    return placeholder


def _placeholder(x: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """Of this shape, and one number of memory; no view, which could not be changed in place."""
    strides = (0,) * len(shape)
    return torch.empty_strided(shape, strides, dtype=dtype or x.dtype, device=x.device)


def _split(
    compute: Callable[[], Tensor],
    x: Tensor,
    alias: Tensor,
    bias: Tensor | None,
    deferred: DeferredWeightGrad,
    is_transposed: bool,
) -> Tensor:
    dtype, device = alias.dtype, x.device.type
    if torch.is_autocast_enabled(device) and torch.float64 not in (x.dtype, dtype):
        dtype = torch.get_autocast_dtype(device)
        x = x.to(dtype)
    return _computed(
        compute,
        lambda now: _SplitLinear.apply(
            x, alias, bias, _LinearCall(deferred, is_transposed, dtype), now
        ),
    )


class _LinearCall(NamedTuple):
    """What `_SplitLinear` needs to know besides its tensors."""

    deferred: DeferredWeightGrad
    is_transposed: bool  # `x @ weight + bias` instead of `x @ weight.t() + bias`
    dtype: torch.dtype  # of the products


@final
class _SplitLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        call: _LinearCall,
        compute: _Compute | None,
    ) -> Tensor:
        ctx.save_for_backward(_MARK, x, weight if ctx.needs_input_grad[0] else None)
        ctx.call, ctx.bias_shape = call, None if bias is None else bias.shape
        if compute is not None:
            return compute()
        width = weight.shape[int(call.is_transposed)]
        return _placeholder(x, *x.shape[:-1], width, dtype=call.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _, x, weight = ctx.saved_tensors
        call: _LinearCall = ctx.call
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_x = grad_weight = grad_bias = None
        if needs_x:
            weight = weight.to(call.dtype)
            rows = grad.reshape(-1, grad.shape[-1])
            grad_x = rows @ (weight.t() if call.is_transposed else weight)
            grad_x = grad_x.view(x.shape)
        if needs_weight:
            of_weight = _grad_of_transposed if call.is_transposed else _grad_of_weight
            grad_weight = defer(call.deferred, of_weight, x, grad, can_add=True)
        if needs_bias:
            grad_bias = grad.sum_to_size(ctx.bias_shape)
        return grad_x, grad_weight, grad_bias, None, None


def _grad_of_weight(x: Tensor, grad: Tensor, to: Tensor | None = None) -> Tensor | None:
    """[N, K]."""
    return product(grad.reshape(-1, grad.shape[-1]).t(), x.reshape(-1, x.shape[-1]), to)


def _grad_of_transposed(x: Tensor, grad: Tensor, to: Tensor | None = None) -> Tensor | None:
    """[K, N]."""
    return product(x.reshape(-1, x.shape[-1]).t(), grad.reshape(-1, grad.shape[-1]), to)


@final
class _SplitGroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows_RK: Tensor,
        weight_EKN: Tensor,
        offsets_E: Tensor,
        deferred: DeferredWeightGrad,
        compute: _Compute | None,
    ) -> Tensor:
        needed = weight_EKN if ctx.needs_input_grad[0] else None
        ctx.save_for_backward(_MARK, rows_RK, needed, offsets_E)
        ctx.deferred = deferred
        if compute is not None:
            return compute()
        return _placeholder(rows_RK, rows_RK.shape[0], weight_EKN.shape[2])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RN: Tensor) -> tuple[Tensor | None, ...]:
        _, rows_RK, weight_EKN, offsets_E = ctx.saved_tensors
        grad_rows = grad_weight = None
        grad_RN = grad_RN.contiguous()  # an expanded one is refused
        if ctx.needs_input_grad[0]:
            grad_rows = F.grouped_mm(grad_RN, weight_EKN.mT, offs=offsets_E)
        if ctx.needs_input_grad[1]:
            work = _grad_of_transposed_groups if ctx.deferred.is_transposed else _grad_of_groups
            grad_weight = defer(ctx.deferred, work, rows_RK, grad_RN, offsets_E)
        return grad_rows, grad_weight, None, None, None


def _grad_of_groups(rows_RK: Tensor, grad_RN: Tensor, offsets_E: Tensor) -> Tensor:
    """[E, K, N]."""
    return F.grouped_mm(rows_RK.mT, grad_RN, offs=offsets_E)


def _grad_of_transposed_groups(rows_RK: Tensor, grad_RN: Tensor, offsets_E: Tensor) -> Tensor:
    """[E, K, N], stored as [E, N, K]."""
    return F.grouped_mm(grad_RN.mT, rows_RK, offs=offsets_E).mT


def looped_product(rows_RK: Tensor, weight_ENK: Tensor, counts: tuple[int, ...]) -> Tensor:
    """[R, N]: the rows of each group, `counts` of them, times its transposed weight, one by one.

    Any float dtype. The weight's gradient is deferred under `split_backward`.
    """
    alias_ENK, deferred = deferrable(weight_ENK)

    def compute() -> Tensor:
        pieces = zip(rows_RK.split(counts), alias_ENK.unbind(), strict=True)
        return torch.cat([F.linear(rows, weight) for rows, weight in pieces])

    return _computed(
        compute, lambda now: _LoopedProduct.apply(rows_RK, alias_ENK, counts, deferred, now)
    )


@final
class _LoopedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows_RK: Tensor,
        weight_ENK: Tensor,
        counts: tuple[int, ...],
        deferred: DeferredWeightGrad | None,
        compute: _Compute | None,
    ) -> Tensor:
        ctx.save_for_backward(_MARK, rows_RK, weight_ENK if ctx.needs_input_grad[0] else None)
        ctx.counts, ctx.deferred = counts, deferred
        if compute is not None:
            return compute()
        return _placeholder(rows_RK, rows_RK.shape[0], weight_ENK.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RN: Tensor) -> tuple[Tensor | None, ...]:
        _, rows_RK, weight_ENK = ctx.saved_tensors
        counts = ctx.counts
        grad_rows = grad_weight = None
        if ctx.needs_input_grad[0]:
            pieces = zip(grad_RN.split(counts), weight_ENK.unbind(), strict=True)
            grad_rows = torch.cat([grad @ weight for grad, weight in pieces])
        if ctx.needs_input_grad[1]:

            def of_groups(
                rows_RK: Tensor, grad_RN: Tensor, to: Tensor | None = None
            ) -> Tensor | None:
                pairs = zip(grad_RN.split(counts), rows_RK.split(counts), strict=True)
                if to is None:
                    return torch.stack([grad.t() @ rows for grad, rows in pairs])
                for out, (grad, rows) in zip(to.unbind(), pairs, strict=True):
                    if len(rows):
                        add_product(out, grad.t(), rows)
                return None

            grad_weight = defer(ctx.deferred, of_groups, rows_RK, grad_RN, can_add=True)
        return grad_rows, grad_weight, None, None, None
