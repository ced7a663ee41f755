"""What stands between an expert's two products, forward and backward.

An expert computes `down(weight * act(pre))`, where `pre` is the output of its first product. `act`
is one of

- `phi(gate) * up` for gated experts, `pre` holding both: gate in the first half and up in the
  second, or, `interleaved`, in even and odd columns (GPT-OSS);
- `phi(pre)` without a gate;
- with a `limit` L: `g * sigmoid(alpha * g) * (u + 1)` for `g = min(gate, L)` and `u = up` clamped
  to -L .. L (GPT-OSS); no gradient passes at the limit or beyond.

Calling an `Activation` is plain autograd. `weighted` and `backward` are the same by hand, for
autograd functions that save `pre` alone; both work in fp32 for half-precision tensors (fp64 stays)
and round once, at the end.

    act = Activation(name="silu")
    act_RH = act(pre_RG)
    act_RH = act.weighted(pre_RG, weights_R)

Dims: R rows, H intermediate, G = 2H if gated, else H.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_pipeline.config import ExpertsOptions

# Elements of [rows, H] that are worked on together on a CPU: a handful of them stay near a core.
_CACHE_ELEMENTS = 1 << 17


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which dtype elementwise work on `dtype` is done: fp64 in fp64, all else in fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """The function between the products of an expert; see the module's docstring.

    Attributes:
        name: phi, "silu", "gelu" or "gelu_pytorch_tanh".
        has_gate: whether `pre` holds a gate and an up half.
        limit: None: nothing is clamped, and alpha means nothing.
        alpha: factor inside the sigmoid, with a limit.
        interleaved: gate and up alternate in `pre`.
    """

    name: str = "silu"
    has_gate: bool = True
    limit: float | None = None
    alpha: float = 1.702
    interleaved: bool = False

    @classmethod
    def of(cls, options: ExpertsOptions, *, interleaved: bool = False) -> "Activation":
        """The activation that `options` describe."""
        return cls(
            name=options.hidden_act,
            has_gate=options.has_gate,
            limit=options.swiglu_limit,
            alpha=options.swiglu_alpha,
            interleaved=interleaved and options.has_gate,
        )

    def __call__(self, pre_RG: Tensor) -> Tensor:
        """[R, G] to [R, H], in the dtype of `pre_RG`; any number of derivatives."""
        gate, up = self._split(pre_RG)
        if up is None:
            return self._phi(gate)
        if self.limit is None:
            return self._phi(gate) * up
        # Not clamp: torch versions differ in its gradient at the limit itself.
        gate = F.hardtanh(gate, -math.inf, self.limit)
        up = F.hardtanh(up, -self.limit, self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up + 1)

    def weighted(self, pre_RG: Tensor, weights_R: Tensor) -> Tensor:
        """`weights * act(pre)`, in the dtype of `pre_RG`. Not differentiable."""
        act_RH = pre_RG.new_empty(pre_RG.shape[0], pre_RG.shape[1] // (1 + self.has_gate))
        for pre, weights, out in _chunks(act_RH, pre_RG, weights_R, act_RH):
            gate, up = self._split(pre.to(compute_dtype(pre.dtype)))
            act = self._value(gate)
            if up is not None:
                act.mul_(self._factor(up))
            if out.dtype == act.dtype:
                torch.mul(act, weights.unsqueeze(1), out=out)
            else:
                out.copy_(act.mul_(weights.unsqueeze(1)))
        return act_RH

    def backward(
        self,
        pre_RG: Tensor,
        weights_R: Tensor,
        grad_act_RH: Tensor,
        grad_weights_out: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """What `weighted` returned, and the gradient of `pre_RG`, both in its dtype.

        `grad_act_RH`, the gradient of what `weighted` returned, is overwritten; the gradient of the
        weights is written to `grad_weights_out` [R], if that is given.
        """
        act_RH, grad_pre_RG = torch.empty_like(grad_act_RH), torch.empty_like(pre_RG)
        if grad_weights_out is None:
            grad_weights_out = torch.empty_like(weights_R)
        tensors = (pre_RG, weights_R, grad_act_RH, act_RH, grad_pre_RG, grad_weights_out)
        for chunk in _chunks(act_RH, *tensors):
            self._backward_chunk(*chunk)
        return act_RH, grad_pre_RG

    def _backward_chunk(self, *chunk: Tensor) -> None:
        pre, weights, grad, act_out, grad_pre_out, grad_weights_out = chunk
        dtype = compute_dtype(pre.dtype)
        in_place = pre.dtype == dtype
        pre, grad, weights_R1 = pre.to(dtype), grad.to(dtype), weights.unsqueeze(1)
        gate, up = self._split(pre)
        value = self._value(gate)
        act = value if up is None else value * self._factor(up)
        torch.sum(act * grad, dim=1, out=grad_weights_out)
        grad.mul_(weights_R1)
        if in_place or self.limit is not None:
            grad_pre = grad_pre_out if in_place else torch.empty_like(pre)
            grad_gate, grad_up = self._split(grad_pre)
        else:  # the fp32 copies take the results: less memory to walk through
            grad_gate, grad_up = gate, value
        if up is not None and grad_up is not None:
            torch.mul(grad, value, out=grad_up)
            if self.limit is not None:
                grad_up.masked_fill_(up.abs() >= self.limit, 0.0)
            grad.mul_(self._factor(up))
        self._derivative(grad, gate, out=grad_gate)
        if in_place:
            torch.mul(act, weights_R1, out=act_out)
        else:
            act_out.copy_(act.mul_(weights_R1))
            for out, found in zip(self._split(grad_pre_out), (grad_gate, grad_up), strict=True):
                if out is not None and found is not None:
                    out.copy_(found)

    def _split(self, pre: Tensor) -> tuple[Tensor, Tensor | None]:
        """Gate and up as views, or all of it and None without a gate."""
        if not self.has_gate:
            return pre, None
        if self.interleaved:
            return pre[:, 0::2], pre[:, 1::2]
        hidden = pre.shape[1] // 2
        return pre[:, :hidden], pre[:, hidden:]

    def _phi(self, x: Tensor) -> Tensor:
        if self.name == "silu":
            return F.silu(x)
        return F.gelu(x, approximate=self._approximate)

    @property
    def _approximate(self) -> str:
        return "tanh" if self.name == "gelu_pytorch_tanh" else "none"

    def _factor(self, up: Tensor) -> Tensor:
        """What the gate's value is multiplied by."""
        return up if self.limit is None else up.clamp(-self.limit, self.limit).add_(1.0)

    def _value(self, gate: Tensor) -> Tensor:
        """`phi(gate)`, clamped and scaled with a limit; a new tensor."""
        if self.limit is None:
            return self._phi(gate)
        # g * sigmoid(a * g) = silu(a * g) / a
        return F.silu(gate.clamp(max=self.limit).mul_(self.alpha)).div_(self.alpha)

    def _derivative(self, grad: Tensor, gate: Tensor, *, out: Tensor) -> None:
        """`grad` times the derivative of `_value` at `gate`, written to `out`."""
        if self.limit is not None:
            scaled = gate.clamp(max=self.limit).mul_(self.alpha)
            torch.ops.aten.silu_backward.grad_input(grad, scaled, grad_input=out)
            out.masked_fill_(gate >= self.limit, 0.0)
        elif self.name == "silu":
            torch.ops.aten.silu_backward.grad_input(grad, gate, grad_input=out)
        else:
            torch.ops.aten.gelu_backward.grad_input(
                grad, gate, approximate=self._approximate, grad_input=out
            )


def _chunks(act_RH: Tensor, *rows: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Pieces of tensors of equally many rows, so small that a CPU's cache holds them."""
    if act_RH.device.type != "cpu" or act_RH.numel() <= _CACHE_ELEMENTS:
        return iter([rows])
    size = max(1, _CACHE_ELEMENTS // act_RH.shape[1])
    return zip(*(r.split(size) for r in rows), strict=True)
