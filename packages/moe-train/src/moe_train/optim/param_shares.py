"""Parameters that are shared out: each rank keeps its own rows, and whole ones while it computes.

A block (a layer) is made whole from the rows of all ranks (one all-gather) as its forward begins,
and let go of as that ends; in a backward from the gradient of its output to that of its input. What
belongs to no block is whole until the first one begins, or in all of a stage's computations where
the head or layers for multi-token prediction use it again; arXiv 1910.02054, "P_os+g+p".

What is let go of is the memory behind the same parameter, so that whatever a graph has saved of it
is there again in the backward.

Invariant: the ranks of a stage do the same computations and so meet in one order.

    shares = ParameterShares([row_shares], stages)
    shares.own[weight]                               # this rank's rows, which updates change
    shares.let_go()                                  # once all else is built
    executor.step(inputs, targets, around=shares.around)
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import final

import torch
from torch import Tensor, nn

from moe_pipeline.schedules import Action, Kind
from moe_train.optim.shares import RowShares
from moe_train.optim.stage_blocks import Part, StageBlocks, parts_of


@final
class ParameterShares:
    """This rank's rows; forward hooks of blocks and stages make parameters whole.

    Args:
        shares: of the parameters that are shared out, in the same order on every rank.
        stages: of this rank, by number.
    """

    def __init__(self, shares: Sequence[RowShares], stages: Mapping[int, StageBlocks]) -> None:
        self.own: dict[nn.Parameter, Tensor] = {}
        for share in shares:
            for parameter in share.parameters:
                self.own[parameter] = parameter.data[share.own(parameter)].clone()
        self._shares = tuple(shares)
        self._parts = {number: parts_of(stage, shares) for number, stage in stages.items()}
        self._stages = dict(stages) if shares else {}
        self._whole: set[Part] = {part for parts in self._parts.values() for part in parts}
        self._action: Action | None = None

    def holds(self, shares: RowShares) -> bool:
        """Whether these are parameters that are shared out."""
        return shares in self._shares

    def named(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """By name this rank's rows of those parameters that are shared out."""
        return {name: self.own[p] for name, p in parameters.items() if p in self.own}

    def let_go(self) -> None:
        """From now on hold whole parameters only while they are used."""
        for number, stage in self._stages.items():
            parts = self._parts[number]
            stage.module.register_forward_pre_hook(partial(self._enter_stage, parts[-1]))
            stage.module.register_forward_hook(partial(self._leave_stage, number))
            for at, (block, _) in enumerate(stage.blocks):
                is_head = stage.has_head and at == len(stage.blocks) - 1
                # The embedding, unless the head or layers for MTP need it again.
                done = parts[-1] if at == 0 and not stage.uses_rest_again else None
                block.register_forward_pre_hook(partial(self._enter, parts[at], done))
                if not is_head:
                    block.register_forward_hook(partial(self._leave, parts[at], parts[at + 1]))
        for part in list(self._whole):
            self._free(part)

    @contextmanager
    def around(self, action: Action) -> Iterator[None]:
        """Around each computation of a step on this rank. Collective over the ranks of a stage."""
        self._action = action
        stage, parts = self._stages[action.stage], self._parts[action.stage]
        is_whole = action.kind in (Kind.BACKWARD, Kind.INPUT_GRADIENT)
        if is_whole and stage.has_head:
            self._gather(parts[-2])
        if is_whole and stage.uses_rest_again:
            self._gather(parts[-1])
        try:
            yield
        finally:
            self._action = None
            for part in parts:
                self._free(part)

    @property
    def _is_in_backward(self) -> bool:
        return self._action is not None and self._action.kind is not Kind.FORWARD

    def _enter_stage(self, rest: Part, *_: object) -> None:
        self._gather(rest)

    def _leave_stage(self, number: int, *_: object) -> None:
        for part in self._parts[number]:
            self._free(part)

    def _enter(self, part: Part, done: Part | None, *_: object) -> None:
        if done is not None:
            self._free(done)
        self._gather(part)

    def _leave(
        self, part: Part, following: Part, _: nn.Module, inputs: object, outputs: object
    ) -> None:
        """A block has returned; `following` is the one before it in a backward."""
        if self._is_in_backward:
            return  # computed again, for what follows
        first = outputs[0] if isinstance(outputs, tuple) else outputs
        if isinstance(first, Tensor) and first.requires_grad:
            first.register_hook(partial(self._go_back, part, following))
        self._free(part)

    def _go_back(self, part: Part, following: Part, _: Tensor) -> None:
        self._free(following)
        self._gather(part)

    @torch.no_grad()
    def _gather(self, part: Part) -> None:
        """Make the parameters of a part whole. Collective."""
        if part in self._whole:
            return
        self._whole.add(part)
        for shares, parameters in part.parameters:
            for parameter in parameters:
                parameter.untyped_storage().resize_(parameter.nbytes)
            own = [self.own[parameter] for parameter in parameters]
            shares.all_gather(parameters, own)

    def _free(self, part: Part) -> None:
        if part in self._whole:
            self._whole.remove(part)
            for _, parameters in part.parameters:
                for parameter in parameters:
                    parameter.untyped_storage().resize_(0)
