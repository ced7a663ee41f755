"""The update of this rank's parameters, with fp32 master weights as an option.

The updates themselves are torch's fused AdamW and Muon; what stands here is what training adds:
names for the state (so that it can be saved under any layout), master weights, a rule for each
parameter, and that Muon sees matrices: of a fused expert tensor each expert's gate, up and down.

    optimizer = Optimizer(parameters, rules, config.optimizer, master_weights=False)
    optimizer.step(gradients, lr=3e-4)
"""

from collections.abc import Callable, Mapping, Sequence
from inspect import unwrap
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from moe_train.config import OptimizerConfig
from moe_train.optim.grads import GradientStore
from moe_train.optim.rounding import StochasticRounding
from moe_train.optim.shares import RowShares
from moe_train.optim.slices import slices_of
from moe_train.optim.update_rules import UpdateRule

MUON_MOMENT = "momentum_buffer"
"""The moment of what Muon updates; the others are AdamW's."""
_MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "muon": (MUON_MOMENT,)}


def _eager(kind: type[torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
    """An optimizer of torch without its breaks for torch.compile.

    Those import the compiler when an optimizer is made, seconds of the start of every rank.
    """
    step: Callable[..., Any] = unwrap(kind.step)
    own = {"add_param_group": unwrap(kind.add_param_group), "step": torch.no_grad()(step)}
    return type(kind.__name__, (kind,), own)


_AdamW, _Muon = _eager(torch.optim.AdamW), _eager(torch.optim.Muon)


class Optimizer:
    """torch's optimizers on named parameters.

    Args:
        parameters: name -> parameter.
        rules: of each of them.
        config: betas, eps, momentum.
        master_weights: keep an fp32 copy of every parameter, update it, and round it back.
        rounding: of bfloat16 parameters without such copies, updated in fp32; of no use for Muon.
        shares: of parameters whose rows are shared out; a step is then collective over their ranks.
        rows: this rank's rows of parameters that are shared out themselves, which nobody shows to
            the others before they are used.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        rules: Mapping[str, UpdateRule],
        config: OptimizerConfig,
        *,
        master_weights: bool,
        rounding: StochasticRounding | None = None,
        shares: Sequence[RowShares] = (),
        rows: Mapping[nn.Parameter, Tensor] = MappingProxyType({}),
    ) -> None:
        self._rounding, self._num_updates = rounding, 0
        self._shares, self._rules = tuple(shares), dict(rules)
        own = {p: p.data[share.own(p)] for share in shares for p in share.parameters}
        own |= rows
        # What this rank updates: views of the parameters, or its rows of them.
        self._held = {name: own.get(p, p.data) for name, p in parameters.items()}
        self._parameters = dict(parameters)
        self.late: dict[str, int] = {}
        self.master: dict[str, Tensor] = {}
        if master_weights:
            self.master = {n: t.float().clone() for n, t in self._held.items()}
        updated = self.master or self._held
        if rounding is not None:  # filled for the time of an update
            updated = {n: t.new_empty(0, dtype=torch.float32) for n, t in self._held.items()}
        self._updated = {name: nn.Parameter(t, requires_grad=True) for name, t in updated.items()}
        # Made here and not on the first step, so that there is always a state to save or load.
        self._moments: dict[str, dict[str, Tensor]] = {}
        for name, tensor in self._updated.items():
            for moment in _MOMENTS[rules[name].algorithm]:
                zeros = torch.zeros_like(self._held[name], dtype=tensor.dtype)
                self._moments.setdefault(moment, {})[name] = zeros
        self._torch: list[torch.optim.Optimizer] = []
        self._matrices = {
            name: [nn.Parameter(matrix) for matrix in _matrices(name, tensor.data)]
            for name, tensor in self._updated.items()
            if rules[name].algorithm == "muon"
        }
        self._add_adamw(config)
        self._add_muon(config)

    def _add_adamw(self, config: OptimizerConfig) -> None:
        groups: dict[tuple[float, float], list[nn.Parameter]] = {}
        for name, tensor in self._updated.items():
            rule = self._rules[name]
            if rule.algorithm == "adamw":
                groups.setdefault((rule.lr_ratio, rule.weight_decay), []).append(tensor)
        if not groups:
            return
        adamw = _AdamW(
            [{"params": p, "lr_ratio": r, "weight_decay": w} for (r, w), p in groups.items()],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )
        for name, tensor in self._updated.items():
            if self._rules[name].algorithm == "adamw":
                step = torch.zeros((), dtype=torch.float32, device=tensor.device)
                moments = {m: self._moments[m][name] for m in _MOMENTS["adamw"]}
                adamw.state[tensor] = {"step": step, **moments}
        self._torch.append(adamw)

    def _add_muon(self, config: OptimizerConfig) -> None:
        groups = [
            {
                "params": matrices,
                "lr_ratio": self._rules[name].lr_ratio,
                "weight_decay": self._rules[name].weight_decay,
            }
            for name, matrices in self._matrices.items()
            if matrices
        ]
        if not groups:
            return
        # Updates as large as AdamW's (arXiv 2502.16982), so that one learning rate serves both.
        muon = _Muon(
            groups, lr=config.lr, momentum=config.muon_momentum, adjust_lr_fn="match_rms_adamw"
        )
        for name, matrices in self._matrices.items():
            buffers = _matrices(name, self._moments[MUON_MOMENT][name])
            for matrix, buffer in zip(matrices, buffers, strict=True):
                muon.state[matrix] = {MUON_MOMENT: buffer}
        self._torch.append(muon)

    def step(self, gradients: GradientStore, lr: float) -> None:
        """Apply one update with learning rate `lr`; collective where rows are shared out."""
        self._num_updates += 1
        for names in self._parts():
            self._step(names, gradients, lr)
        self.show()

    def show(self) -> None:
        """Bring master weights into the parameters, and every rank's rows to all. Collective."""
        for name, master in self.master.items():
            self._held[name].copy_(master)
        for share in self._shares:
            share.show()

    def _parts(self) -> list[list[str]]:
        """Parameters that are updated together: all, or few enough for exact copies beside."""
        names = list(self._updated)
        if self._rounding is None:
            return [names]
        return [names[part] for part in slices_of([self._held[n].numel() for n in names])]

    def _step(self, names: Sequence[str], gradients: GradientStore, lr: float) -> None:
        for name in names:
            tensor, gradient = self._updated[name], gradients.of(self._parameters[name])
            if self._rounding is not None:
                tensor.data, gradient = self._held[name].float(), gradient.float()
            if name not in self._matrices:
                tensor.grad = gradient
                continue
            parts = _matrices(name, gradient)
            for matrix, part in zip(self._matrices[name], parts, strict=True):
                matrix.grad = part
        for optimizer in self._torch:
            for group in optimizer.param_groups:
                group["lr"] = lr * group["lr_ratio"]
            optimizer.step()
        for tensor in chain(self._updated.values(), *self._matrices.values()):
            tensor.grad = None
        if self._rounding is not None:
            self._round(names, self._rounding)

    def _round(self, names: Sequence[str], rounding: StochasticRounding) -> None:
        """Store exact weights in the parameters, and let go of them."""
        for name in names:
            exact = self._updated[name]
            rounding.write(name, exact.data, self._held[name], update=self._num_updates)
            exact.data = exact.data.new_empty(0)

    def updated(self) -> dict[str, Tensor]:
        """Parameter name -> what updates change, this rank's rows: master weights or itself."""
        return self.master or dict(self._held)

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """Moment name -> parameter name -> tensor shaped as `updated`; views, not copies."""
        return {moment: dict(tensors) for moment, tensors in self._moments.items()}

    def set_step(self, step: int, late: Mapping[str, int] | None = None) -> None:
        """Tell the bias correction how many updates have been applied.

        Args:
            late: name -> updates before the parameter was trained, kept as `self.late`.
        """
        self.late, self._num_updates = dict(late or {}), step
        for optimizer in self._torch:
            for name, tensor in self._updated.items():
                if "step" in optimizer.state.get(tensor, {}):
                    optimizer.state[tensor]["step"].fill_(float(step - self.late.get(name, 0)))


def _matrices(name: str, tensor: Tensor) -> list[Tensor]:
    """The matrices that a parameter consists of, as views: of every expert, gate and up apart."""
    matrices = [tensor] if tensor.dim() == 2 else list(tensor.unbind())
    if name.endswith("gate_up_proj"):
        matrices = [half for matrix in matrices for half in matrix.chunk(2)]
    return matrices
