"""The parts of a stage whose shared out tensors travel together.

parts = parts_of(StageBlocks(...), shares)     # of each block, then of what belongs to none
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from torch import nn

from moe_train.optim.shares import RowShares


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBlocks:
    """One stage of this rank.

    Args:
        module: the stage.
        parameters: of the whole stage, in the same order on every rank of the stage.
        blocks: modules of the stage in the order of its forward, each called with a tensor first
            through which alone gradients go on to what lies before it; and the parameters that are
            used behind that tensor, and before that of the next block.
        has_head: the last block is the head, whose parameters are used when it has returned.
        uses_rest_again: what belongs to no block is needed in a backward.
    """

    module: nn.Module
    parameters: Sequence[nn.Parameter]
    blocks: Sequence[tuple[nn.Module, Sequence[nn.Parameter]]]
    has_head: bool = False
    uses_rest_again: bool = False


@final
@dataclass(eq=False)
class Part:
    """Parameters whose rows travel together, by who shares them out."""

    parameters: list[tuple[RowShares, list[nn.Parameter]]] = field(default_factory=list)


def parts_of(stage: StageBlocks, shares: Sequence[RowShares]) -> list[Part]:
    """A part for each block, and as the last one what belongs to none."""
    in_blocks = {parameter for _, own in stage.blocks for parameter in own}
    rest = [parameter for parameter in stage.parameters if parameter not in in_blocks]
    return [_part(own, shares) for own in (*(own for _, own in stage.blocks), rest)]


def stages_of_parameters(
    stages: Mapping[int, StageBlocks],
) -> dict[nn.Parameter, frozenset[int]]:
    """By parameter the numbers of the stages that use it."""
    found: dict[nn.Parameter, set[int]] = {}
    for number, stage in stages.items():
        for parameter in stage.parameters:
            found.setdefault(parameter, set()).add(number)
    return {parameter: frozenset(numbers) for parameter, numbers in found.items()}


def _part(parameters: Sequence[nn.Parameter], shares: Sequence[RowShares]) -> Part:
    chosen = set(parameters)
    found = [(share, [p for p in share.parameters if p in chosen]) for share in shares]
    return Part([(share, own) for share, own in found if own])
