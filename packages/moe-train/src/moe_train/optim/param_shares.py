"""Parameters that are shared out: each rank keeps its own rows, and whole ones while it computes.

A block (a layer) is made whole from the rows of all ranks (one all-gather) as its forward begins,
and let go of as that ends; in a backward from the gradient of its output to that of its input. Rows
of the next block travel while one is computed. What belongs to no block is whole until the first
one begins, or in all of a stage's computations where the head or layers for multi-token prediction
use it again; arXiv 1910.02054, "P_os+g+p".

What is let go of is the memory behind the same parameter, so that whatever a graph has saved of it
is there again in the backward.

Invariant: the ranks of a stage do the same computations and so meet in one order.

    shares = ParameterShares([row_shares], stages)
    shares.own[weight]                               # this rank's rows, which updates change
    shares.let_go()                                  # once all else is built
    executor.step(inputs, targets, around=shares.around)
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
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
        self._ahead: dict[Part, list[Callable[[], None]]] = {}  # whose rows travel

    def holds(self, shares: RowShares) -> bool:
        """Whether these are parameters that are shared out."""
        return shares in self._shares

    def named(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """By name this rank's rows of those parameters that are shared out."""
        return {name: self.own[p] for name, p in parameters.items() if p in self.own}

    def let_go(self) -> None:
        """From now on hold whole parameters only while they are used."""
        for number, stage in self._stages.items():
            *blocks, rest = parts = self._parts[number]
            first = next(iter(blocks), None)
            stage.module.register_forward_pre_hook(partial(self._enter_stage, rest, first))
            stage.module.register_forward_hook(partial(self._leave_stage, number))
            for at, (block, _) in enumerate(stage.blocks):
                # The embedding is done with, unless the head or layers for MTP need it again.
                done = rest if at == 0 and not stage.uses_rest_again else None
                before = blocks[at - 1] if at else None
                after = blocks[at + 1] if at + 1 < len(blocks) else None
                enter = partial(self._enter, blocks[at], done, before, after)
                block.register_forward_pre_hook(enter)
                if not stage.has_head or after is not None:
                    leave = partial(self._leave, blocks[at], before, parts[at + 1])
                    block.register_forward_hook(leave)
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
            self._drop_ahead()
        finally:
            self._action = None
            self._ahead.clear()
            for part in parts:
                self._free(part)

    @property
    def _is_in_backward(self) -> bool:
        return self._action is not None and self._action.kind is not Kind.FORWARD

    def _enter_stage(self, rest: Part, first: Part | None, *_: object) -> None:
        self._gather(rest, first)

    def _leave_stage(self, number: int, *_: object) -> None:
        self._drop_ahead()
        for part in self._parts[number]:
            self._free(part)

    def _enter(
        self, part: Part, done: Part | None, before: Part | None, after: Part | None, *_: object
    ) -> None:
        """A block is called, in a backward to be computed again."""
        if done is not None:
            self._free(done)
        self._gather(part, before if self._is_in_backward else after)

    def _leave(
        self,
        part: Part,
        before: Part | None,
        after: Part,
        _: nn.Module,
        inputs: object,
        outputs: object,
    ) -> None:
        if self._is_in_backward:
            return  # computed again, for what follows
        first = outputs[0] if isinstance(outputs, tuple) else outputs
        if isinstance(first, Tensor) and first.requires_grad:
            first.register_hook(partial(self._go_back, part, before, after))
        self._free(part)

    def _go_back(self, part: Part, before: Part | None, after: Part, _: Tensor) -> None:
        """A backward has gone through what lies after a block."""
        self._free(after)
        self._gather(part, before)

    @torch.no_grad()
    def _gather(self, part: Part, following: Part | None = None) -> None:
        """Make the parameters of a part whole, and have the rows of another travel. Collective."""
        if part in self._whole:
            return
        self._whole.add(part)
        fills = self._ahead.pop(part, None) or self._start(part)
        for _, parameters in part.parameters:
            for parameter in parameters:
                parameter.untyped_storage().resize_(parameter.nbytes)
        for fill in fills:
            fill()
        if following is not None and following not in self._whole | self._ahead.keys():
            self._ahead[following] = self._start(following)

    def _start(self, part: Part) -> list[Callable[[], None]]:
        return [
            shares.start_all_gather(parameters, [self.own[p] for p in parameters])
            for shares, parameters in part.parameters
        ]

    def _drop_ahead(self) -> None:
        """Wait for rows that travel for nothing, so that no rank is left alone with them."""
        for part in list(self._ahead):
            self._gather(part)
            self._free(part)

    def _free(self, part: Part) -> None:
        if part in self._whole:
            self._whole.remove(part)
            for _, parameters in part.parameters:
                for parameter in parameters:
                    parameter.untyped_storage().resize_(0)
