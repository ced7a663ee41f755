"""The MLP that every token passes besides its routed experts.

    shared_experts = SharedExpert(config)
    shared_expert_gate = SharedExpertGate(config)           # Qwen2-MoE only
    out_TD = out_TD + shared_experts(x_TD, shared_expert_gate(x_TD))

Parameters have the names of transformers' shared experts. Several shared experts are one MLP of
their total width, as in DeepSeek's checkpoints. Each rank applies the whole of it to its own
tokens, so its gradients are reduced like those of any dense layer; or ranks have parts of the width
and apply these to the tokens of all (`in_parts`), so that only ranks with the same part sum theirs.

Unless `experts_implementation="loop"`, the MLP saves its input and the outputs of the first two
projections, and recomputes the activation in backward; the gate's factor is folded in before the
down projection. That function cannot be differentiated twice; the loop can.

Dims: T tokens, D hidden, S width of the shared expert.
"""

from typing import Any, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from comm_collectives import all_gather, reduce_scatter
from moe_pipeline.config import MoEConfig, SharedExpertOptions
from moe_pipeline.errors import MoEValueError
from moe_pipeline.weight_grad import DeferredWeightGrad, defer, deferrable, product


@final
class SharedExpert(nn.Module):
    """`down_proj(scale * act(gate_proj(x)) * up_proj(x))` with `hidden_act` of the experts.

    Parameters `gate_proj.weight` and `up_proj.weight` [S, D], `down_proj.weight` [D, S].

    Args:
        tp_size: ranks that share S out evenly; the output is then a part of their sum.

    Raises:
        ValueError: S does not divide.
    """

    def __init__(
        self,
        config: MoEConfig,
        *,
        tp_size: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        d, s = config.hidden_size, _options(config).moe_shared_expert_intermediate_size
        if s % tp_size:
            raise MoEValueError(
                f"tp axis has {tp_size} ranks but moe_shared_expert_intermediate_size={s}; choose "
                f"a divisor of {s}"
            )
        s //= tp_size
        self.gate_proj = nn.Linear(d, s, bias=False, device=device, dtype=dtype)
        self.up_proj = nn.Linear(d, s, bias=False, device=device, dtype=dtype)
        self.down_proj = nn.Linear(s, d, bias=False, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights from a normal distribution with `initializer_range`."""
        for projection in (self.gate_proj, self.up_proj, self.down_proj):
            nn.init.normal_(projection.weight, std=self.config.initializer_range)

    def forward(self, x_TD: Tensor, scale_T1: Tensor | None = None) -> Tensor:
        """Apply the MLP to [T, D] tokens in the dtype of the parameters. Not collective.

        `scale_T1`: factor of each token's output, differentiable (`SharedExpertGate`).
        """
        gate, up, down = self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight
        act = self.config.experts.hidden_act
        # Autocast picks a dtype per operation, which only autograd's own backward follows.
        plain = torch.is_autocast_enabled(x_TD.device.type)
        if plain or self.config.experts.experts_implementation == "loop":
            act_TS = _gated(F.linear(x_TD, gate), F.linear(x_TD, up), scale_T1, act)
            return F.linear(act_TS, down)
        weights, deferred = zip(*(deferrable(w) for w in (gate, up, down)), strict=True)
        return _FusedMLP.apply(  # type: ignore[no-any-return]
            x_TD, scale_T1, *weights, _MLPCall(act, deferred)
        )


def in_parts(
    shared: SharedExpert, x_BPD: Tensor, group: ProcessGroup, timeout_s: float | None = None
) -> Tensor:
    """What a shared expert returns of which each rank of a group has a part, [B, P, D]. Collective.

    So is its backward. Each rank brings, and gets, its own run of the positions of the same
    sequences: runs as equal as can be, the longer ones first.

    Raises:
        ValueError: this rank's run is not one of these.
    """
    x_SBD = all_gather(x_BPD.transpose(0, 1), group=group, timeout_s=timeout_s)
    each, longer = divmod(len(x_SBD), group.size())
    splits = [each + (rank < longer) for rank in range(group.size())]
    if x_BPD.shape[1] != splits[group.rank()]:
        raise MoEValueError(
            f"rank {group.rank()} of groups.tp brings {x_BPD.shape[1]} of {len(x_SBD)} positions; "
            f"its {group.size()} ranks have runs as equal as can be, the longer ones first: give "
            f"it {splits[group.rank()]}"
        )
    part_SBD = shared(x_SBD.flatten(0, 1)).view(x_SBD.shape)
    own = reduce_scatter(part_SBD, splits=splits, group=group, timeout_s=timeout_s)
    return own.transpose(0, 1)


@final
class SharedExpertGate(nn.Module):
    """`sigmoid(x @ weight)`, the factor of a shared expert (Qwen2-MoE); `weight` is [1, D]."""

    def __init__(
        self,
        config: MoEConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _options(config)
        self.config = config
        self.weight = nn.Parameter(torch.empty(1, config.hidden_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight from a normal distribution with `initializer_range`."""
        nn.init.normal_(self.weight, std=self.config.initializer_range)

    def forward(self, x_TD: Tensor) -> Tensor:
        """Factors [T, 1] of [T, D] tokens."""
        return torch.sigmoid(F.linear(x_TD, self.weight))


def _options(config: MoEConfig) -> SharedExpertOptions:
    if config.shared_expert is None:
        raise MoEValueError("a shared expert needs MoEConfig(shared_expert=...), and it is None")
    return config.shared_expert


def _gated(gate_TS: Tensor, up_TS: Tensor, scale_T1: Tensor | None, act: str) -> Tensor:
    if act == "silu":
        act_TS = F.silu(gate_TS)
    else:
        act_TS = F.gelu(gate_TS, approximate="tanh" if act == "gelu_pytorch_tanh" else "none")
    act_TS = act_TS * up_TS
    return act_TS if scale_T1 is None else act_TS * scale_T1


class _MLPCall(NamedTuple):
    """What `_FusedMLP` needs to know besides its tensors."""

    act: str
    deferred: tuple[DeferredWeightGrad | None, ...]  # of gate, up and down


@final
class _FusedMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        scale_T1: Tensor | None,
        gate_SD: Tensor,
        up_SD: Tensor,
        down_DS: Tensor,
        call: _MLPCall,
    ) -> Tensor:
        gate_TS, up_TS = F.linear(x_TD, gate_SD), F.linear(x_TD, up_SD)
        ctx.save_for_backward(x_TD, scale_T1, gate_SD, up_SD, down_DS, gate_TS, up_TS)
        ctx.call = call
        return F.linear(_gated(gate_TS, up_TS, scale_T1, call.act), down_DS)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, scale_T1, gate_SD, up_SD, down_DS, gate_TS, up_TS = ctx.saved_tensors
        need_x, need_scale, need_gate, need_up, need_down, *_ = ctx.needs_input_grad
        inputs = [gate_TS.detach().requires_grad_(), up_TS.detach().requires_grad_()]
        if need_scale:
            scale_T1 = scale_T1.detach().requires_grad_()
            inputs.append(scale_T1)
        with torch.enable_grad():
            act_TS = _gated(inputs[0], inputs[1], scale_T1, ctx.call.act)
        grads = torch.autograd.grad(act_TS, inputs, grad_TD @ down_DS)
        grad_gate_TS, grad_up_TS = grads[:2]
        grad_x = None
        if need_x:
            grad_x = torch.addmm(grad_gate_TS @ gate_SD, grad_up_TS, up_SD)
        products = (
            (need_gate, grad_gate_TS, x_TD),
            (need_up, grad_up_TS, x_TD),
            (need_down, grad_TD, act_TS.detach()),
        )
        grad_weights = (
            defer(deferred, _outer_product, left, right, can_add=True) if need else None
            for deferred, (need, left, right) in zip(ctx.call.deferred, products, strict=True)
        )
        return (grad_x, grads[2] if need_scale else None, *grad_weights, None)


def _outer_product(left: Tensor, right: Tensor, to: Tensor | None = None) -> Tensor | None:
    return product(left.t(), right, to)
