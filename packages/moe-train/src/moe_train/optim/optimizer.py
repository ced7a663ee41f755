"""The update of this rank's parameters, with fp32 master weights as an option.

The updates themselves are torch's fused AdamW and Muon (`torch_updates`); what stands here is what
training adds: names for the state (so that it can be saved under any layout), master weights, a
rule for each parameter, rounding by chance, and states that live in the host's memory.

    optimizer = Optimizer(parameters, rules, config.optimizer, StateOptions())
    optimizer.step(gradients, lr=3e-4)
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor, nn

from moe_train.config import OptimizerConfig
from moe_train.optim.grads import GradientStore
from moe_train.optim.host_states import HostStates
from moe_train.optim.pieces import Piece, parts_of
from moe_train.optim.rounding import StochasticRounding
from moe_train.optim.shares import RowShares
from moe_train.optim.torch_updates import MOMENTS, PieceState, TorchUpdates
from moe_train.optim.update_rules import UpdateRule


@dataclass(frozen=True, slots=True, kw_only=True)
class StateOptions:
    """What is kept for updates, and where.

    Args:
        master_weights: keep an fp32 copy of every parameter, update it, and round it back.
        rounding: of bfloat16 parameters without such copies, updated in fp32; of no use for Muon.
        on_host: moments and master weights live in the host's memory, and visit the device for
            their updates. With "meta" they have no memory.
    """

    master_weights: bool = False
    rounding: StochasticRounding | None = None
    on_host: Literal["cpu", "meta"] | None = None


class Optimizer:
    """torch's optimizers on named parameters.

    Args:
        parameters: name -> parameter.
        rules: of each of them.
        config: betas, eps, momentum.
        options: what is kept for updates, and where.
        shares: of parameters whose rows are shared out; a step is then collective over their ranks.
        rows: this rank's rows of parameters that are shared out themselves, which nobody shows to
            the others before they are used.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        rules: Mapping[str, UpdateRule],
        config: OptimizerConfig,
        options: StateOptions,
        *,
        shares: Sequence[RowShares] = (),
        rows: Mapping[nn.Parameter, Tensor] = MappingProxyType({}),
    ) -> None:
        self._rounding, self._num_updates = options.rounding, 0
        self._host: HostStates | None = None
        if options.on_host and parameters:
            device = next(iter(parameters.values())).device
            self._host = HostStates(device, options.on_host)
        self._shares, self._rules, self._config = tuple(shares), dict(rules), config
        own = {p: p.data[share.own(p)] for share in shares for p in share.parameters}
        own |= rows
        # What this rank updates: views of the parameters, or its rows of them.
        self._held = {name: own.get(p, p.data) for name, p in parameters.items()}
        self._parameters = dict(parameters)
        self.late: dict[str, int] = {}
        self._is_exact = options.master_weights or options.rounding is not None
        self._master: dict[str, Tensor] = {}
        if options.master_weights:
            self._master = self._zeros(self._held)
            for name, tensor in self._held.items():
                self._master[name].copy_(tensor)
        # Made here and not on the first step, so that there is always a state to save or load.
        self._moments = {
            moment: self._zeros(chosen)
            for algorithm, names in MOMENTS.items()
            if (chosen := {n: t for n, t in self._held.items() if rules[n].algorithm == algorithm})
            for moment in names
        }
        stays = self._host is None and self._rounding is None
        self._parts = [[Piece(name) for name in self._held]] if stays else self._cut()
        self._num_updates_of = {
            piece: torch.zeros((), dtype=torch.float32, device=self._held[piece.name].device)
            for part in self._parts
            for piece in part
        }
        # Updates of tensors that stay where they are are made once.
        self._kept = self._updates(self._parts[0], self._states(self._parts[0])) if stays else None

    def _zeros(self, likes: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors shaped as these, in the dtype of updates, where states live."""
        dtypes = {n: torch.float32 if self._is_exact else t.dtype for n, t in likes.items()}
        if self._host is None:
            return {n: torch.zeros_like(like, dtype=dtypes[n]) for n, like in likes.items()}
        found: dict[str, Tensor] = {}
        for each in dict.fromkeys(dtypes.values()):
            found |= self._host.zeros({n: t for n, t in likes.items() if dtypes[n] == each}, each)
        return {name: found[name] for name in likes}

    def _cut(self) -> list[list[Piece]]:
        """What is updated together: little enough for copies of it beside."""
        shapes = {name: tensor.shape for name, tensor in self._held.items()}
        matrices = {n for n, s in shapes.items() if len(s) == 2}
        return parts_of(shapes, {n for n in matrices if self._rules[n].algorithm == "muon"})

    def _states(self, part: Sequence[Piece]) -> list[Tensor]:
        """Master weights and moments of each piece, where they live."""
        found: list[Tensor] = []
        for piece in part:
            names = MOMENTS[self._rules[piece.name].algorithm]
            each = [self._master] if self._master else []
            each += [self._moments[name] for name in names]
            found += [piece.of(tensors[piece.name]) for tensors in each]
        return found

    def _updates(self, part: Sequence[Piece], states: Sequence[Tensor]) -> TorchUpdates:
        """The updates of a part whose states lie here at present."""
        left, found = iter(states), []
        for piece in part:
            rule, weight = self._rules[piece.name], piece.of(self._held[piece.name])
            if self._master:
                weight = next(left)
            elif self._rounding is not None:
                weight = weight.float()
            found.append(
                PieceState(
                    piece=piece,
                    rule=rule,
                    weight=weight,
                    moments={name: next(left) for name in MOMENTS[rule.algorithm]},
                    num_updates=self._num_updates_of[piece],
                )
            )
        return TorchUpdates(found, self._config)

    def step(self, gradients: GradientStore, lr: float) -> None:
        """Apply one update with learning rate `lr`; collective where rows are shared out."""
        self._num_updates += 1
        for updates in self._in_turn():
            self._update(updates, gradients, lr)
        for share in self._shares:
            share.show()

    def _in_turn(self) -> Iterator[TorchUpdates]:
        """The updates of each part, for as long as its states are where they are computed."""
        if self._kept is not None:
            yield self._kept
            return
        states = [self._states(part) for part in self._parts]
        visits = iter(states) if self._host is None else self._host.visits(states)
        for here, part in zip(visits, self._parts, strict=True):
            yield self._updates(part, here)

    def _update(self, updates: TorchUpdates, gradients: GradientStore, lr: float) -> None:
        given = [s.piece.of(gradients.of(self._parameters[s.piece.name])) for s in updates.states]
        updates.step(given if self._rounding is None else [g.float() for g in given], lr)
        for state in updates.states:
            name, held = state.piece.name, state.piece.of(self._held[state.piece.name])
            if self._master:
                held.copy_(state.weight)
            elif self._rounding is not None:
                self._rounding.write(
                    name, state.weight, held, update=self._num_updates, row=state.piece.first
                )

    def show(self) -> None:
        """Bring master weights into the parameters, and every rank's rows to all. Collective."""
        for name, master in self.master.items():
            self._held[name].copy_(master)
        for share in self._shares:
            share.show()

    def held(self) -> dict[str, Tensor]:
        """Parameter name -> what this rank updates of it, in the parameter's dtype."""
        return dict(self._held)

    @property
    def master(self) -> dict[str, Tensor]:
        """Parameter name -> its fp32 copy, this rank's rows; empty without master weights."""
        self._settle()
        return self._master

    def updated(self) -> dict[str, Tensor]:
        """Parameter name -> what updates change, this rank's rows: master weights or itself."""
        return self.master or dict(self._held)

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """Moment name -> parameter name -> tensor shaped as `updated`; views, not copies."""
        self._settle()
        return {moment: dict(tensors) for moment, tensors in self._moments.items()}

    @staticmethod
    def is_counted(moment: str) -> bool:
        """Whether the number of updates corrects its bias, as it does AdamW's and not Muon's."""
        return moment in MOMENTS["adamw"]

    def _settle(self) -> None:
        if self._host is not None:
            self._host.settle()

    def set_step(self, step: int, late: Mapping[str, int] | None = None) -> None:
        """Tell the bias correction how many updates have been applied.

        Args:
            late: name -> updates before the parameter was trained, kept as `self.late`.
        """
        self.late, self._num_updates = dict(late or {}), step
        for piece, count in self._num_updates_of.items():
            count.fill_(float(step - self.late.get(piece.name, 0)))
