"""ZBV, V-Half and V-Min: two stages on each rank in a V, backwards split (arXiv 2405.15362).

Ranks run stages down and up again, so that the rank that starts a microbatch also ends it, and an
activation that lives long on one side of the V is paired with one that lives briefly. How long is
set by a building block: the slots at which each rank runs the two forwards and the two input
gradients of one microbatch. Repeated every six slots (four of these and two weight gradients) it
fills every rank; how far the block is stretched decides how many activations are held.

    schedule = v_half(num_ranks=4, num_microbatches=8)
"""

from collections import Counter
from typing import final

from moe_pipeline.schedules.generators.building_block import Block, rows_of_block
from moe_pipeline.schedules.generators.rows import check_sizes, finish
from moe_pipeline.schedules.table import Action, Kind, Schedule


def zbv(num_ranks: int, num_microbatches: int) -> Schedule:
    """Zero bubble in a V (also arXiv 2401.10241): the memory of 1F1B, `num_ranks` activations.

    With T_F = T_I = T_W and `2 num_ranks - 1` microbatches or more no rank pauses between its first
    action and its last. Its order knows no costs: with others, or slow transfers, `plan`, which
    does, is faster in the same memory.

    Raises:
        ValueError: a size below 1.
    """
    check_sizes(num_ranks=num_ranks, num_microbatches=num_microbatches)
    p = num_ranks
    if num_microbatches >= 2 * p - 1:
        rows = [_ZbvRow(rank, p, num_microbatches).actions for rank in range(p)]
    else:  # too few for the rows' steady part: the block that they repeat, squeezed
        end = 6 * (p - 1)
        blocks = [(3 * r, end + 1 - 3 * r, end + 2 + 3 * r, 2 * end + 3 - 3 * r) for r in range(p)]
        rows = rows_of_block(blocks, num_microbatches, limit=2 * p)
    return finish("zbv", rows, num_microbatches, num_stages=2 * p)


def v_half(num_ranks: int, num_microbatches: int) -> Schedule:
    """Half the memory of 1F1B: about (p + 2) / 2 activations on p ranks.

    Raises:
        ValueError: a size below 1.
    """
    check_sizes(num_ranks=num_ranks, num_microbatches=num_microbatches)
    p, pause = num_ranks, 3 if num_ranks % 2 == 0 else 0
    blocks: list[Block] = [
        (2 * r, 3 * p - 2 - r, 3 * p - 1 + pause + 2 * r, 6 * p - 2 + pause - r) for r in range(p)
    ]
    rows = rows_of_block(blocks, num_microbatches)
    return finish("v_half", rows, num_microbatches, num_stages=2 * p)


def v_min(num_ranks: int, num_microbatches: int) -> Schedule:
    """A third of the memory of 1F1B: about (p + 4) / 3 activations on p ranks.

    Raises:
        ValueError: a size below 1.
    """
    check_sizes(num_ranks=num_ranks, num_microbatches=num_microbatches)
    p, pause = num_ranks, 2 if num_ranks % 3 == 0 else 0
    blocks: list[Block] = [
        (r, 2 * p - 1 - r, 2 * p + pause + r, 4 * p - 1 + pause - r) for r in range(p)
    ]
    rows = rows_of_block(blocks, num_microbatches)
    return finish("v_min", rows, num_microbatches, num_stages=2 * p)


_DOWN = (0, Kind.FORWARD)
_UP = (1, Kind.FORWARD)
_DOWN_I, _DOWN_W = (0, Kind.INPUT_GRADIENT), (0, Kind.WEIGHT_GRADIENT)
_UP_I, _UP_W = (1, Kind.INPUT_GRADIENT), (1, Kind.WEIGHT_GRADIENT)


@final
class _ZbvRow:
    """What a rank does in ZBV with `size` >= 2 `num_ranks` - 1 microbatches."""

    def __init__(self, rank: int, num_ranks: int, size: int) -> None:
        self.actions: list[Action] = []
        self._stages = (rank, 2 * num_ranks - 1 - rank)
        self._next: Counter[tuple[int, Kind]] = Counter()
        above = num_ranks - rank
        self._repeat(2 * above - 1, _DOWN)
        self._repeat(rank, _UP, _DOWN)
        self._repeat(above, _UP, _UP_I, _UP_W)
        started = 2 * above - 1 + rank
        self._repeat(size - started, _DOWN, _DOWN_I, _DOWN_W, _UP, _UP_I, _UP_W)
        self._repeat(started - num_ranks, _DOWN_I, _DOWN_W, _UP, _UP_I, _UP_W)
        self._repeat(rank, _DOWN_I, _UP_I)
        self._repeat(above, _DOWN_I, _DOWN_W)
        self._repeat(rank, _UP_W)
        self._repeat(rank, _DOWN_W)

    def _repeat(self, times: int, *what: tuple[int, Kind]) -> None:
        for _ in range(times):
            for side, kind in what:
                microbatch = self._next[side, kind]
                self.actions.append(Action(self._stages[side], kind, microbatch))
                self._next[side, kind] += 1
