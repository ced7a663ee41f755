"""torch's AdamW and Muon on pieces of parameters, whose memory somebody else owns.

Muon sees matrices: of a fused expert tensor each expert's gate, up and down.

    updates = TorchUpdates([state, ...], config)
    updates.step([gradient, ...], lr=3e-4)
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn

from moe_train.config import OptimizerConfig
from moe_train.optim.pieces import Piece
from moe_train.optim.update_rules import UpdateRule

_MUON_MOMENT = "momentum_buffer"
MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "muon": (_MUON_MOMENT,)}
"""The names of the moments, by algorithm."""


def _eager(kind: type[torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
    """An optimizer of torch without its breaks for torch.compile.

    Those import the compiler when an optimizer is made, seconds of the start of every rank.
    """
    step: Callable[..., Any] = unwrap(kind.step)
    own = {"add_param_group": unwrap(kind.add_param_group), "step": torch.no_grad()(step)}
    return type(kind.__name__, (kind,), own)


_AdamW, _Muon = _eager(torch.optim.AdamW), _eager(torch.optim.Muon)


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceState:
    """What an update of a piece reads and writes, on the device that computes it.

    `weight`: what is updated in place. `moments`: by name, shaped as it. `num_updates`: of AdamW,
    how many it has had, a scalar that updates count up.
    """

    piece: Piece
    rule: UpdateRule
    weight: Tensor
    moments: Mapping[str, Tensor]
    num_updates: Tensor


class TorchUpdates:
    """torch's optimizers on these pieces; their gradients are given to each step, in this order."""

    def __init__(self, states: Sequence[PieceState], config: OptimizerConfig) -> None:
        self.states = tuple(states)
        self._weights = [
            [nn.Parameter(each) for each in _parts(state, state.weight)] for state in states
        ]
        self._torch: list[torch.optim.Optimizer] = []
        self._add_adamw(states, config)
        self._add_muon(states, config)

    def _add_adamw(self, states: Sequence[PieceState], config: OptimizerConfig) -> None:
        groups: dict[tuple[float, float], list[nn.Parameter]] = {}
        for state, weights in zip(states, self._weights, strict=True):
            if state.rule.algorithm == "adamw":
                key = state.rule.lr_ratio, state.rule.weight_decay
                groups.setdefault(key, []).extend(weights)
        if not groups:
            return
        adamw = _AdamW(
            [{"params": p, "lr_ratio": r, "weight_decay": w} for (r, w), p in groups.items()],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )
        for state, weights in zip(states, self._weights, strict=True):
            if state.rule.algorithm == "adamw":
                adamw.state[weights[0]] = {"step": state.num_updates, **state.moments}
        self._torch.append(adamw)

    def _add_muon(self, states: Sequence[PieceState], config: OptimizerConfig) -> None:
        chosen = [
            (state, weights)
            for state, weights in zip(states, self._weights, strict=True)
            if state.rule.algorithm == "muon" and weights
        ]
        if not chosen:
            return
        groups = [
            {"params": w, "lr_ratio": s.rule.lr_ratio, "weight_decay": s.rule.weight_decay}
            for s, w in chosen
        ]
        # Updates as large as AdamW's (arXiv 2502.16982), so that one learning rate serves both.
        muon = _Muon(
            groups, lr=config.lr, momentum=config.muon_momentum, adjust_lr_fn="match_rms_adamw"
        )
        for state, weights in chosen:
            buffers = _parts(state, state.moments[_MUON_MOMENT])
            for weight, buffer in zip(weights, buffers, strict=True):
                muon.state[weight] = {_MUON_MOMENT: buffer}
        self._torch.append(muon)

    def step(self, gradients: Sequence[Tensor], lr: float) -> None:
        """Apply one update; not collective."""
        for state, weights, gradient in zip(self.states, self._weights, gradients, strict=True):
            for weight, part in zip(weights, _parts(state, gradient), strict=True):
                weight.grad = part
        for optimizer in self._torch:
            for group in optimizer.param_groups:
                group["lr"] = lr * group["lr_ratio"]
            optimizer.step()
        for weights in self._weights:
            for weight in weights:
                weight.grad = None


def _parts(state: PieceState, tensor: Tensor) -> list[Tensor]:
    """Of what is shaped as a piece, the views that torch's optimizer works on."""
    return _matrices(state.piece.name, tensor) if state.rule.algorithm == "muon" else [tensor]


def _matrices(name: str, tensor: Tensor) -> list[Tensor]:
    """The matrices that a parameter consists of, as views: of every expert, gate and up apart."""
    matrices = [tensor] if tensor.dim() == 2 else list(tensor.unbind())
    if name.endswith("gate_up_proj"):
        matrices = [half for matrix in matrices for half in matrix.chunk(2)]
    return matrices
