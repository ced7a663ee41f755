"""Dropout and the residual addition in one step, the same in every layout.

Which numbers are dropped follows from `moe_pipeline.ops.rng`: from a key, the token and the column.
So backward and recompute find the same ones again and no mask is saved, and a token loses the same
numbers whatever rank it is on. The sum is taken in fp32 (fp64 for fp64) and rounded once, whereas
`residual + dropout(x)` rounds twice; with `p=0` the two are the same to the last bit.

    key = counter_key(seed, layer, step)
    hidden = dropout_add(x, hidden, p=0.1, key=key, token_ids=token_ids, training=True)

Method: Srivastava et al., Dropout: A Simple Way to Prevent Neural Networks from Overfitting (JMLR
2014), in the form that scales by `1 / (1 - p)` in training.
"""

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from moe_pipeline._torch_private import not_compiled
from moe_pipeline.errors import MoETypeError, MoEValueError
from moe_pipeline.ops.rng import counter_blocks


@not_compiled
def dropout_add(
    x: Tensor, residual: Tensor, *, p: float, key: int, token_ids: Tensor, training: bool
) -> Tensor:
    """`residual + dropout(x)`, rounded once. Differentiable, also twice. Not collective.

    What is dropped adds exactly 0, be it infinite.

    Args:
        x: [..., D] in any float dtype.
        residual: the shape of `x`, any float dtype.
        p: probability of a number to be dropped, 0 .. 1; taken in steps of 2^-32.
        key: which stream: another one for each step, layer and use. See `rng.counter_key`.
        token_ids: integers of shape `x.shape[:-1]` on the device of `x`, such as positions in the
            global batch.
        training: False: nothing is dropped.

    Returns:
        [..., D] in the dtype of `x + residual`.

    Raises:
        ValueError: `p` out of range, or shapes that do not fit.
        TypeError: `token_ids` or `key` are not integers, or `x` and `residual` are not floats.
    """
    _check_dropout(x, p, token_ids)
    if residual.shape != x.shape:
        raise MoEValueError(
            f"residual has shape {tuple(residual.shape)} and x {tuple(x.shape)}; give both the same"
        )
    if not residual.is_floating_point():
        raise MoETypeError(f"residual must be a float tensor, got {residual.dtype}")
    if not training or p == 0.0:
        return x + residual
    dropped = _Dropped(p=p, key=key, width=x.shape[-1])
    dtype = torch.promote_types(x.dtype, residual.dtype)
    return _DropoutAdd.apply(x, residual, token_ids, dropped, dtype)  # type: ignore[no-any-return]


@not_compiled
def dropout(
    x: Tensor,
    *,
    p: float,
    key: int,
    token_ids: Tensor,
    training: bool,
    first_column: int = 0,
) -> Tensor:
    """Dropout alone, such as that of embeddings: `dropout_add` without a residual.

    `first_column`: the global index of the first column, where columns are split over ranks.
    """
    _check_dropout(x, p, token_ids)
    if not training or p == 0.0:
        return x
    dropped = _Dropped(p=p, key=key, width=x.shape[-1], first_column=first_column)
    return _DropoutAdd.apply(x, None, token_ids, dropped, x.dtype)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dropped:
    p: float
    key: int
    width: int
    first_column: int = 0

    def scaled_sum(
        self, x: Tensor, residual: Tensor | None, token_ids: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """`residual + x * mask / (1 - p)` in `dtype`, in blocks that fit a cache."""
        wide = torch.promote_types(dtype, torch.float32)
        x_TD = x.reshape(token_ids.numel(), self.width)
        residual_TD = None if residual is None else residual.reshape(x_TD.shape)
        out_TD = torch.empty(x_TD.shape, dtype=dtype, device=x.device)
        first_kept = round(self.p * 2**32) - 2**31  # of numbers uniform in -2^31 .. 2^31 - 1
        scale = 1.0 / (1.0 - self.p) if self.p < 1.0 else 0.0
        blocks = counter_blocks(
            self.key, token_ids.reshape(-1), self.width, first_column=self.first_column
        )
        for rows, bits in blocks:
            is_dropped = bits < first_kept if first_kept < 2**31 else torch.ones_like(bits) > 0
            block = torch.empty(bits.shape, dtype=wide, device=x.device)
            block.copy_(x_TD[rows]).mul_(scale).masked_fill_(is_dropped, 0.0)
            if residual_TD is not None:
                block.add_(residual_TD[rows])
            out_TD[rows] = block
        return out_TD.view(x.shape)


@final
class _DropoutAdd(torch.autograd.Function):
    """Linear in both inputs, so that its gradient is itself without a residual."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        token_ids: Tensor,
        dropped: _Dropped,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.save_for_backward(token_ids)
        ctx.dropped = dropped
        ctx.dtypes = x.dtype, None if residual is None else residual.dtype
        return dropped.scaled_sum(x, residual, token_ids, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (token_ids,) = ctx.saved_tensors
        x_dtype, residual_dtype = ctx.dtypes
        grad_x = grad_residual = None
        if ctx.needs_input_grad[0]:
            grad_x = _DropoutAdd.apply(grad, None, token_ids, ctx.dropped, x_dtype)
        if ctx.needs_input_grad[1]:
            grad_residual = grad.to(residual_dtype)
        return grad_x, grad_residual, None, None, None


def _check_dropout(x: Tensor, p: float, token_ids: Tensor) -> None:
    if not 0.0 <= p <= 1.0:
        raise MoEValueError(f"p={p} is no probability; give 0 .. 1")
    if not x.is_floating_point():
        raise MoETypeError(f"dropout takes a float tensor, got {x.dtype}")
    if x.dim() == 0 or token_ids.shape != x.shape[:-1]:
        raise MoEValueError(
            f"token_ids has shape {tuple(token_ids.shape)} and x {tuple(x.shape)}; give one id for "
            "each token, of shape x.shape[:-1]"
        )
