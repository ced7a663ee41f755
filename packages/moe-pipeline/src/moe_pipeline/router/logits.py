"""Router logits: computed in full precision, saved in the precision of the model.

In bf16 near-ties would decide the routing, so the product is taken in fp32 (fp64 stays fp64), also
under autocast. Plain autograd would then keep an fp32 copy of every token until backward; this
function keeps the tokens as they came, which the experts keep anyway.

    logits_TE = router_logits(x_TD, weight_ED, bias_E)

Dims: T tokens, D hidden, E experts.
"""

from functools import partial
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_pipeline.errors import MoEValueError
from moe_pipeline.weight_grad import DeferredWeightGrad, defer, deferrable


def router_logits(x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
    """Return `x @ weight.t() + bias`, [T, E] in fp32, or fp64 if an argument is; differentiable."""
    weight_ED, deferred = deferrable(weight_ED)
    return _FullPrecisionLinear.apply(  # type: ignore[no-any-return]
        x_TD, weight_ED, bias_E, deferred
    )


def with_values(computed_TE: Tensor, values_TE: Tensor) -> Tensor:
    """Return exactly `values_TE`, with the gradient of `computed_TE`.

    A recompute may differ from the first forward in rounding. With the first's values everything
    downstream is what it was, and the gradient still reaches what the logits came from.
    """
    if values_TE.shape != computed_TE.shape or values_TE.dtype != computed_TE.dtype:
        raise MoEValueError(
            f"logits_TE is {values_TE.dtype} of shape {tuple(values_TE.shape)}, but these tokens "
            f"have logits of {computed_TE.dtype} and shape {tuple(computed_TE.shape)}; give the "
            "logits that the first forward of these tokens returned"
        )
    return _GivenValues.apply(computed_TE, values_TE)  # type: ignore[no-any-return]


@final
class _FullPrecisionLinear(torch.autograd.Function):
    """A linear layer whose casts are repeated in backward instead of saved."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weight_ED: Tensor,
        bias_E: Tensor | None,
        deferred: DeferredWeightGrad | None,
    ) -> Tensor:
        """[T, D] in, [T, E] out."""
        ctx.save_for_backward(x_TD, weight_ED)
        ctx.deferred = deferred
        ctx.bias_dtype = None if bias_E is None else bias_E.dtype
        dtype = torch.promote_types(torch.promote_types(x_TD.dtype, weight_ED.dtype), torch.float)
        with torch.autocast(device_type=x_TD.device.type, enabled=False):
            bias = None if bias_E is None else bias_E.to(dtype)
            return F.linear(x_TD.to(dtype), weight_ED.to(dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor | None, ...]:
        """Each in the dtype of its argument; differentiable."""
        x_TD, weight_ED = ctx.saved_tensors
        wants_x, wants_weight, wants_bias, _ = ctx.needs_input_grad
        dtype = grad_TE.dtype
        grad_x = grad_weight = grad_bias = None
        with torch.autocast(device_type=grad_TE.device.type, enabled=False):
            if wants_x:
                grad_x = (grad_TE @ weight_ED.to(dtype)).to(x_TD.dtype)
            if wants_weight:
                work = partial(_grad_of_router, weight_ED.dtype)
                grad_weight = defer(ctx.deferred, work, x_TD, grad_TE)
            if wants_bias:
                grad_bias = grad_TE.sum(dim=0).to(ctx.bias_dtype)
        return grad_x, grad_weight, grad_bias, None


def _grad_of_router(dtype: torch.dtype, x_TD: Tensor, grad_TE: Tensor) -> Tensor:
    with torch.autocast(device_type=grad_TE.device.type, enabled=False):
        return (grad_TE.t() @ x_TD.to(grad_TE.dtype)).to(dtype)


@final
class _GivenValues(torch.autograd.Function):
    """The second argument's values, the first one's gradient."""

    @staticmethod
    def forward(ctx: Any, computed_TE: Tensor, values_TE: Tensor) -> Tensor:
        """Return the values, without a copy."""
        return values_TE.detach()

    @staticmethod
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor, None]:
        """Pass the gradient to what was computed."""
        return grad_TE, None
