"""DualPipe and DualPipeV (DeepSeek-V3, arXiv 2412.19437): forwards beside backwards.

In the middle of these schedules each forward stands directly before a backward of another
microbatch, so that an executor may run the pair together and hide one's communication behind the
other's work (`Schedule.paired`).

DualPipe feeds microbatches from both ends: rank r holds stage r for the first half of them and a
copy of stage p - 1 - r for the second half (`Schedule.copies`). DualPipeV folds that into a V with
two stages on a rank and no copy; its ranks do what one half of DualPipe's do.

    schedule = dualpipe_v(num_ranks=4, num_microbatches=8)
"""

from collections import Counter, deque
from typing import final

from moe_pipeline.schedules.generators.rows import check_sizes, finish, folded_rank
from moe_pipeline.schedules.table import Action, Kind, Schedule


def dualpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """Both directions at once: two copies of each stage, one activation more than 1F1B.

    An odd number of stages has one in the middle that needs no copy. Odd numbers of microbatches
    give the first direction one more.

    Raises:
        ValueError: a size below 1.
    """
    check_sizes(num_stages=num_stages, num_microbatches=num_microbatches)
    half_ranks = (num_stages + 1) // 2
    first = (num_microbatches + 1) // 2
    size = max(first, 2 * half_ranks)
    rows = []
    paired: list[Action] = []
    for rank in range(num_stages):
        mirror = num_stages - 1 - rank
        depth = min(rank, mirror)
        # Near its end a direction's microbatches come first, far from it the other's.
        near, far = (0, 1) if rank <= mirror else (1, 0)
        row = _Row(half_ranks, depth, size)
        kept = []
        for number, (phase, kind, m) in enumerate(row.actions):
            direction = (near, far)[phase]
            if m < (first, num_microbatches - first)[direction]:
                stage = mirror if direction else rank
                kept.append(Action(stage, kind, m + first * direction))
                paired += kept[-1:] * (number in row.paired)
        rows.append(kept)
    return finish("dualpipe", rows, num_microbatches, copies=2, paired=paired)


def dualpipe_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """DualPipe in a V: two stages on each rank, no copies.

    Raises:
        ValueError: a size below 1.
    """
    check_sizes(num_ranks=num_ranks, num_microbatches=num_microbatches)
    rows = []
    paired: list[Action] = []
    for rank in range(num_ranks):
        stages = [s for s in range(2 * num_ranks) if folded_rank(s, num_ranks) == rank]
        row = _Row(num_ranks, rank, max(num_microbatches, 2 * num_ranks))
        rows.append([Action(stages[phase], kind, m) for phase, kind, m in row.actions])
        paired += [rows[-1][number] for number in row.paired]
    return finish("dualpipe_v", rows, num_microbatches, num_stages=2 * num_ranks, paired=paired)


@final
class _Row:
    """What the rank at `depth` does, as (phase, kind, microbatch) in order.

    Phase 0 is the way down from an end, phase 1 the way back up; `ranks` is the length of the way
    and `size` >= 2 `ranks` the microbatches of each phase. The eight parts are the paper's.
    """

    def __init__(self, ranks: int, depth: int, size: int) -> None:
        self.actions: list[tuple[int, Kind, int]] = []
        self.paired: set[int] = set()  # indices of forwards
        self._next: Counter[tuple[int, Kind]] = Counter()
        self._weights: deque[tuple[int, int]] = deque()
        above = ranks - 1 - depth
        self._fill(above, depth)
        self._middle(above, size - 2 * ranks + depth + 1)
        self._drain(above, depth)

    def _fill(self, above: int, depth: int) -> None:
        for _ in range(2 * above):
            self._forward(0)
        for _ in range(depth + 1):
            self._forward(0)
            self._forward(1)
        for _ in range(above):
            self._input_gradient(1)
            self._weight_gradient()
            self._forward(1)

    def _middle(self, above: int, turns: int) -> None:
        for turn in range(turns):
            # Where the way turns, the first backward would wait for a forward further on.
            self._forward(0, paired=turn > 0 or above > 0)
            self._backward(1)
            self._forward(1, paired=True)
            self._backward(0)
        for _ in range(above):
            self._backward(1)
            self._forward(1, paired=True)
            self._backward(0)

    def _drain(self, above: int, depth: int) -> None:
        # The last half of these backwards are split, which leaves W to fill what follows.
        pairs = depth + 1
        for i in range(2 * pairs):
            if i < pairs:
                self._backward(1 - i % 2)
            else:
                self._input_gradient(1 - i % 2)
        for _ in range(above):
            self._weight_gradient()
            self._input_gradient(0)
        while self._weights:
            self._weight_gradient()

    def _count(self, phase: int, kind: Kind) -> int:
        self._next[phase, kind] += 1
        return self._next[phase, kind] - 1

    def _forward(self, phase: int, *, paired: bool = False) -> None:
        if paired:
            self.paired.add(len(self.actions))
        self.actions.append((phase, Kind.FORWARD, self._count(phase, Kind.FORWARD)))

    def _backward(self, phase: int) -> None:
        self.actions.append((phase, Kind.BACKWARD, self._count(phase, Kind.BACKWARD)))

    def _input_gradient(self, phase: int) -> None:
        m = self._count(phase, Kind.BACKWARD)
        self.actions.append((phase, Kind.INPUT_GRADIENT, m))
        self._weights.append((phase, m))

    def _weight_gradient(self) -> None:
        phase, m = self._weights.popleft()
        self.actions.append((phase, Kind.WEIGHT_GRADIENT, m))
