"""The best schedule that fits in a memory cap.

Two stages on each rank, in a V, with split backwards: the placement with which any amount of
memory, from about a third of 1F1B's, is used well (arXiv 2405.15362). Three sources of candidates:

- named schedules with two stages on a rank;
- building blocks of many shapes, the most stretched ones that fit first (`rows_of_block`);
- list scheduling, with a policy found by local search (`run_policy`).

All know stages as more or less alike. So the fastest few under the given costs are where a search
among orders begins (`OrderSearch`), which has no such idea, and finds what to leave idle for what.

Everything is decided by counts and a fixed seed, never by a clock, so that all ranks that plan get
the same schedule.

    schedule = plan(StageCosts(), 8, 32, memory_cap_bytes=10)
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from random import Random
from typing import final

from moe_pipeline._checks import check_finite
from moe_pipeline.errors import MoEValueError, ScheduleError
from moe_pipeline.schedules.generators import (
    PERIOD,
    Block,
    Policy,
    Task,
    check_sizes,
    dualpipe_v,
    finish,
    interleaved_1f1b,
    rows_of_block,
    run_policy,
    v_half,
    v_min,
    zbv,
)
from moe_pipeline.schedules.order_search import OrderSearch
from moe_pipeline.schedules.table import (
    Action,
    Kind,
    Schedule,
    StageCosts,
    add_transfers,
    costs_of_stages,
    simulate,
)

_Generator = Callable[[int, int], Schedule]
_FOLDED: tuple[_Generator, ...] = (zbv, v_half, v_min, dualpipe_v)
# Computations that all tried blocks, policies and orders may have together: about 0.2 s each.
_BLOCK_WORK = 12_000
_POLICY_WORK = 30_000
_ORDER_WORK = 900_000
# Searches among orders, which begin with the fastest few candidates in turn, and how many
# computations' time they may go back at first. More, and bolder ones, where there are few.
_STARTS = 4
_BACK = (0.5, 0.0)
_BACK_IF_SMALL = (2.0, 1.0, 4.0)
# Where orders are few enough to find the best one, it is worth looking at this many times as many.
_FEW, _MORE_WORK = 24, 4
# Tries after which the search starts again from another policy.
_PATIENCE = 120
# Up to so many forwards it pays to move single ones.
_SMALL = 64


def plan(
    costs: StageCosts | Sequence[StageCosts],
    num_ranks: int,
    num_microbatches: int,
    memory_cap_bytes: int,
    *,
    folded: bool = False,
) -> Schedule:
    """A schedule with the shortest makespan found whose activations fit in the cap.

    Args:
        costs: of each of the `2 * num_ranks` stages, or one for all. With the default of one byte
            for each stage, a whole rank's activation of one microbatch is 2.
        num_ranks: ranks of the pipeline, two stages on each.
        num_microbatches: of a step.
        memory_cap_bytes: the most that the activations on any rank may take, as `simulate` counts
            them (`peak_bytes`).
        folded: stages lie in a V, also where a named schedule with them in a loop is faster.

    Returns:
        The schedule, with its sends and receives; `simulate` tells its makespan.

    Raises:
        ValueError: a size below 1, costs of another number of stages, or a cap below what one
            microbatch needs, in a V and, unless `folded`, in a loop.
    """
    check_sizes(num_ranks=num_ranks, num_microbatches=num_microbatches)
    check_finite("memory_cap_bytes", memory_cap_bytes)
    table = costs_of_stages(costs, 2 * num_ranks)
    first, last = table[:num_ranks], table[num_ranks:]
    in_a_v = _least_bytes(first, last[::-1])
    in_a_loop = _least_bytes(first, last)
    least = in_a_v if folded else min(in_a_v, in_a_loop)
    if memory_cap_bytes < least:
        raise MoEValueError(
            f"memory_cap_bytes={memory_cap_bytes} is less than the {least} bytes that one "
            "microbatch needs on some rank; recompute activations or use more ranks"
        )
    task = Task(
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        costs=table,
        memory_cap_bytes=memory_cap_bytes,
    )
    best = _Best(task, folded=folded)
    if memory_cap_bytes >= in_a_v:
        best.try_named(_FOLDED if folded else (*_FOLDED, interleaved_1f1b))
        best.try_blocks()
        best.try_policies()
    else:
        best.try_named((interleaved_1f1b, _one_at_a_time))
    best.try_orders()
    return best.schedule()


def _least_bytes(first: Sequence[StageCosts], second: Sequence[StageCosts]) -> int:
    """What one microbatch needs on some rank; each rank has a first and a second stage."""
    pairs = zip(first, second, strict=True)
    return max(one.activation_bytes + other.activation_bytes for one, other in pairs)


def _one_at_a_time(num_ranks: int, num_microbatches: int) -> Schedule:
    """Stages in a loop, and each microbatch to its end before the next: what fits if any does."""
    rows = [
        [
            Action(stage, kind, m)
            for m in range(num_microbatches)
            for stages, kind in (
                ((rank, rank + num_ranks), Kind.FORWARD),
                ((rank + num_ranks, rank), Kind.BACKWARD),
            )
            for stage in stages
        ]
        for rank in range(num_ranks)
    ]
    return finish("one_at_a_time", rows, num_microbatches, num_stages=2 * num_ranks)


@final
class _Best:
    """The fastest candidate so far; stops when it is as fast as any can be."""

    def __init__(self, task: Task, *, folded: bool) -> None:
        self._task = task
        self._size = 6 * task.num_ranks * task.num_microbatches
        self._makespan = float("inf")
        last = task.costs[task.num_ranks :]
        self._bound = _lower_bound(task, last[::-1])
        if not folded:
            self._bound = min(self._bound, _lower_bound(task, last))
        self._fastest: Schedule | None = None
        self._starts: list[tuple[float, Schedule]] = []

    def schedule(self) -> Schedule:
        if self._fastest is None:
            raise ScheduleError(f"no schedule found for {self._task}")
        return replace(self._fastest, name=f"plan_{self._task.memory_cap_bytes}")

    @property
    def _optimal(self) -> bool:
        return self._makespan <= self._bound * (1 + 1e-12)

    def _keep_faster(self, schedule: Schedule) -> None:
        """Keep it if it fits and is faster than what there is, its transfers included."""
        found = simulate(schedule, self._task.costs)
        if max(found.peak_bytes) > self._task.memory_cap_bytes:
            return
        if all(found.makespan_s != makespan_s for makespan_s, _ in self._starts):
            self._starts.append((found.makespan_s, schedule))
        if found.makespan_s < self._makespan:
            self._makespan, self._fastest = found.makespan_s, schedule

    def _finished(self, rows: Sequence[Iterable[Action]]) -> Schedule:
        compute_only = Schedule(
            name="plan",
            num_stages=2 * self._task.num_ranks,
            num_microbatches=self._task.num_microbatches,
            ranks=tuple(map(tuple, rows)),
        )
        return add_transfers(compute_only, self._task.costs)

    def try_named(self, generators: Iterable[_Generator]) -> None:
        for generate in generators:
            if not self._optimal:
                self._keep_faster(generate(self._task.num_ranks, self._task.num_microbatches))

    def try_blocks(self) -> None:
        task = self._task
        limit = _activations(task)
        tries = max(6, _BLOCK_WORK // self._size)
        for blocks, period in _fitting_blocks(task.num_ranks, limit, tries):
            if self._optimal:
                return
            rows = rows_of_block(blocks, task.num_microbatches, period=period, limit=limit)
            self._keep_faster(self._finished(rows))

    def try_policies(self) -> None:
        tries = max(12, _POLICY_WORK // self._size)
        starts = list(_first_policies(self._task.num_ranks))
        ranked = sorted((self._try(policy), number) for number, policy in enumerate(starts))
        random = Random(0)
        for turn in range(tries):
            if self._optimal:
                return
            start, since = divmod(turn, _PATIENCE)
            if since == 0:
                makespan, number = ranked[start % len(ranked)]
                policy = starts[number]
            changed = _changed(policy, random, self._task)
            found = self._try(changed)
            if found <= makespan:
                makespan, policy = found, changed

    def try_orders(self) -> None:
        task = self._task
        starts = [s for _, s in sorted(self._starts, key=lambda start: start[0])[:_STARTS]]
        forwards = 2 * task.num_ranks * task.num_microbatches
        steps_back = _BACK_IF_SMALL if forwards <= _SMALL else _BACK
        work = _ORDER_WORK * (_MORE_WORK if forwards <= _FEW else 1)
        searches = list(product(steps_back, starts))
        for number, (back, start) in enumerate(searches):
            if self._optimal:
                return
            search = OrderSearch(start, task.costs, memory_cap_bytes=task.memory_cap_bytes)
            found = search.run(
                tries=work // self._size // len(searches),
                threshold=back / (6 * task.num_microbatches),
                seed=number,
            )
            if found.makespan_s < self._makespan:
                self._keep_faster(self._finished(found.rows))

    def _try(self, policy: Policy) -> float:
        found = run_policy(self._task, policy)
        if found is None:
            return float("inf")
        if found.makespan_s < self._makespan:
            self._keep_faster(self._finished(found.rows))
        return found.makespan_s


def _lower_bound(task: Task, others: Sequence[StageCosts]) -> float:
    """No rank can start before its first input comes, nor end before its work is done.

    `others` are the ranks' second stages.
    """
    bound = begin = 0.0
    for pair in zip(task.costs, others, strict=False):
        work = sum(c.forward_s + c.input_gradient_s + c.weight_gradient_s for c in pair)
        bound = max(bound, begin + work * task.num_microbatches)
        begin += pair[0].forward_s + pair[0].forward_transfer_s
    return bound


def _activations(task: Task) -> int:
    """How many activations of a stage fit in the cap on every rank, for stages that are alike."""
    largest = max(costs.activation_bytes for costs in task.costs)
    count = 2 * task.num_microbatches
    return min(count, task.memory_cap_bytes // largest) if largest else count


def _fitting_blocks(p: int, limit: int, count: int) -> list[tuple[list[Block], int]]:
    """Up to `count` blocks that hold at most `limit` activations, the best guesses first.

    Those that leave no slot idle come first, and among these the most stretched.
    """
    found = []
    for steps, period in _shapes():
        ends = (_slots(p, 0, steps), _slots(p, p - 1, steps))
        lives = max(block[3] - block[0] + block[2] - block[1] for block in ends) / period
        if lives <= limit - 0.4:
            blocks = [_slots(p, rank, steps) for rank in range(p)]
            if all(len({slot % period for slot in block}) == 4 for block in blocks):
                found.append((period > PERIOD, -lives, period, blocks))
    found.sort(key=lambda entry: entry[:3])
    return [(blocks, period) for _, _, period, blocks in found[:count]]


# Slots from rank to rank of F, F, I, I, and pauses at the last stage and at the end of the V.
_Steps = tuple[int, int, int, int, int, int]


def _shapes() -> Iterator[tuple[_Steps, int]]:
    steps = product((1, 2, 3), (1, 2, 3), (1, 2, 3), (1, 2, 3), (1, 2, 3, 4, 5), (1, 2, 3))
    return product(steps, (6, 8, 9, 12))


def _slots(p: int, rank: int, steps: _Steps) -> Block:
    """The block of `rank` whose way along the ranks takes `steps` slots from each to the next."""
    down, up, back, home, at_end, at_turn = steps
    ends = p - 1
    turn = down * ends + 1
    loss = turn + up * ends + at_end
    back_turn = loss + back * ends + at_turn
    above = ends - rank
    return (down * rank, turn + up * above, loss + back * rank, back_turn + home * above)


def _first_policies(p: int) -> Iterator[Policy]:
    """Those of the known blocks: of a third, half and all of the memory of 1F1B."""
    known: list[_Steps] = [(1, 1, 1, 1, 1, 1), (2, 1, 2, 1, 4, 1), (3, 3, 3, 3, 1, 1)]
    for steps in known:
        blocks = [_slots(p, rank, steps) for rank in range(p)]
        forward = [b[0] for b in blocks] + [b[1] for b in reversed(blocks)]
        gradient = [b[3] for b in blocks] + [b[2] for b in reversed(blocks)]
        pairs = zip(forward, gradient, strict=True)
        lives = [-(-(end - start) // PERIOD) for start, end in pairs]
        slack = [0] * p + [2] * p
        # The last one prefers what ends a microbatch's way up to what ends it altogether.
        for delay, later in ((0, 0), (6, 0), (12, 0), (1000, 0), (0, 6)):
            yield Policy(
                forward_at=tuple(forward),
                gradient_at=tuple(g + later * (s < p) for s, g in enumerate(gradient)),
                in_flight=tuple(a + b for a, b in zip(lives, slack, strict=True)),
                weight_delay=delay,
            )


def _changed(policy: Policy, random: Random, task: Task) -> Policy:
    """A neighbour: some stages prefer other things, or may have more or less in flight.

    A change concerns one stage, or all of one side of the V.
    """
    in_flight = list(policy.in_flight)
    forward, gradient = list(policy.forward_at), list(policy.gradient_at)
    delay, nudges = policy.weight_delay, dict(policy.nudges)
    for _ in range(random.choice((1, 1, 2, 3))):
        stage, step = random.randrange(len(in_flight)), random.choice((-1, 1))
        side = 0 if stage < task.num_ranks else task.num_ranks
        one = random.random() < 0.75
        stages = [stage] if one else list(range(side, side + task.num_ranks))
        what = random.random()
        if what < 0.2 and len(in_flight) * task.num_microbatches <= _SMALL:
            kind = random.choice((Kind.FORWARD, Kind.INPUT_GRADIENT))
            nudges[Action(stage, kind, random.randrange(task.num_microbatches))] = 7 * step
        elif what < 0.6:
            for s in stages:
                in_flight[s] = min(max(in_flight[s] + step, 1), task.num_microbatches)
        elif what < 0.9:
            slots = forward if what < 0.75 else gradient
            for s in stages:
                slots[s] += (3 if one else 6) * step
        else:
            delay = random.choice((0, 2, 4, 6, 8, 12, 1000))
    return Policy(
        forward_at=tuple(forward),
        gradient_at=tuple(gradient),
        in_flight=tuple(in_flight),
        weight_delay=delay,
        nudges=nudges,
    )
