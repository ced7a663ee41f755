"""How long a schedule takes, and what it holds, under given costs.

Follows a schedule in time; shares no code with the checker or the executor, so that each is held
against the others. A rank does its actions in order, one at a time. A computation waits for what
it needs, its message included; sends and receives wait for nothing: messages travel beside the
work, for the time that `StageCosts` gives them.

    assert simulate(one_f_one_b(8, 16)).makespan_s == 3 * (16 + 7)
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import final

from moe_pipeline._checks import check_type
from moe_pipeline.errors import ScheduleError
from moe_pipeline.schedules.table.costs import StageCosts, costs_of_stages
from moe_pipeline.schedules.table.schedule import COMPUTE, Action, Kind, Schedule

_GRADIENTS = (Kind.BACKWARD, Kind.INPUT_GRADIENT)


@dataclass(frozen=True, slots=True)
class Span:
    """A computation and when it ran."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What `simulate` found.

    Attributes:
        spans: of each rank its computations, in order.
        makespan_s: end of the last one.
        busy_s: of each rank, the time in which it computes.
        peak_bytes: of each rank, the most activation bytes that its stages hold together.
        stage_peak_bytes: of each stage, the most that it holds (of all its copies).
    """

    spans: tuple[tuple[Span, ...], ...]
    makespan_s: float
    busy_s: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    stage_peak_bytes: tuple[int, ...]

    @property
    def bubble(self) -> float:
        """Share of all ranks' time until the makespan in which they do not compute."""
        total = self.makespan_s * len(self.busy_s)
        return 1 - sum(self.busy_s) / total if total else 0.0

    @property
    def inner_idle_s(self) -> tuple[float, ...]:
        """Of each rank, the idle time between its first and its last computation.

        The measure of the zero-bubble paper, which lets a rank start its next step early.
        """
        pairs = zip(self.spans, self.busy_s, strict=True)
        return tuple(s[-1].end_s - s[0].start_s - busy if s else 0.0 for s, busy in pairs)

    @staticmethod
    def measured(rows: Sequence[Sequence[Span]]) -> "Simulation":
        """What a run was measured to take, in the same terms; memory is left out.

        Args:
            rows: of each rank its computations with their times on one clock, whatever its zero.
        """
        begin = min((span.start_s for row in rows for span in row), default=0.0)
        spans = tuple(
            tuple(Span(s.action, s.start_s - begin, s.end_s - begin) for s in row) for row in rows
        )
        return Simulation(
            spans=spans,
            makespan_s=max((span.end_s for row in spans for span in row), default=0.0),
            busy_s=tuple(map(_busy, spans)),
            peak_bytes=(),
            stage_peak_bytes=(),
        )

    def costs(self) -> tuple[StageCosts, ...]:
        """The median times of each stage's computations.

        A whole backward counts as I on a stage that never splits one; beside split ones (DualPipe)
        it says nothing that I and W do not say.
        """
        took: dict[tuple[int, Kind], list[float]] = defaultdict(list)
        for row in self.spans:
            for span in row:
                took[span.action.stage, span.action.kind].append(span.end_s - span.start_s)
        medians = {key: median(seconds) for key, seconds in took.items()}

        def took_of(stage: int, kind: Kind) -> float:
            return medians.get((stage, kind), 0.0)

        return tuple(
            StageCosts(
                forward_s=took_of(stage, Kind.FORWARD),
                input_gradient_s=took_of(stage, Kind.INPUT_GRADIENT)
                or took_of(stage, Kind.BACKWARD),
                weight_gradient_s=took_of(stage, Kind.WEIGHT_GRADIENT),
            )
            for stage in sorted({stage for stage, _ in took})
        )


def simulate(
    schedule: Schedule,
    costs: StageCosts | Sequence[StageCosts] | None = None,
    *,
    pair_saving_s: float | None = None,
) -> Simulation:
    """Run `schedule` in time.

    Args:
        schedule: with or without sends and receives; without, each travels as soon as it is made.
        costs: of each stage, or one for all; None: `StageCosts()`, the papers' units.
        pair_saving_s: None: the forwards in `schedule.paired` and their backwards run in turn, as
            any others do. Otherwise both start together when both can, and take this much less
            than F + B: DualPipe's F&B.

    Raises:
        ScheduleError: some action waits for ever; `check` says why.
        ValueError: costs of another number of stages.
    """
    check_type("schedule", schedule, Schedule)
    table = costs_of_stages(StageCosts() if costs is None else costs, schedule.num_stages)
    clock = _Clock(schedule, table, pair_saving_s)
    clock.run()
    spans = tuple(map(tuple, clock.spans))
    ends = [span.end_s for row in spans for span in row]
    peaks, stage_peaks = _peaks(schedule, table)
    return Simulation(
        spans=spans,
        makespan_s=max(ends, default=0.0),
        busy_s=tuple(map(_busy, spans)),
        peak_bytes=peaks,
        stage_peak_bytes=stage_peaks,
    )


def _busy(row: Sequence[Span]) -> float:
    """Time covered by the spans of a rank; a pair counts once."""
    total = until = 0.0
    for span in row:
        total += span.end_s - max(until, span.start_s)
        until = span.end_s
    return total


@final
class _Clock:
    """Each rank's position and time, and when each computation ended, and where."""

    def __init__(
        self, schedule: Schedule, costs: tuple[StageCosts, ...], pair_saving_s: float | None
    ) -> None:
        self.spans: list[list[Span]] = [[] for _ in schedule.ranks]
        self._schedule = schedule
        self._last = schedule.num_stages - 1
        self._costs = costs
        self._now = [0.0] * len(schedule.ranks)
        self._at = [0] * len(schedule.ranks)
        # (stage, microbatch, forward?) -> rank and time at which the output exists
        self._made: dict[tuple[int, int, bool], tuple[int, float]] = {}
        self._saving = pair_saving_s
        self._begun: set[Action] = set()  # backwards that ran with their forward

    def run(self) -> None:
        while any([self._advance(rank) for rank in range(len(self._at))]):
            pass
        rows = zip(self._schedule.ranks, self._at, strict=True)
        stuck = [str(row[at]) for row, at in rows if at < len(row)]
        if stuck:
            name = self._schedule.name
            raise ScheduleError(f"schedule {name} cannot run: {', '.join(stuck)} wait for ever")

    def _advance(self, rank: int) -> bool:
        row, start = self._schedule.ranks[rank], self._at[rank]
        while self._at[rank] < len(row) and self._perform(rank, row[self._at[rank]]):
            self._at[rank] += 1
        return self._at[rank] > start

    def _perform(self, rank: int, action: Action) -> bool:
        """Do it if what it needs is there or under way; whether it was."""
        if action.kind not in COMPUTE or action in self._begun:
            return True
        if self._saving is not None and action in self._schedule.paired:
            partner = self._partner(rank)
            if partner is not None:
                return self._perform_pair(rank, action, partner, self._saving)
        ready = self._ready(rank, action)
        if ready is None:
            return False
        start = max(self._now[rank], ready)
        self._record(rank, action, start, start + self._duration(action))
        return True

    def _record(self, rank: int, action: Action, start: float, end: float) -> None:
        self._now[rank] = end
        self.spans[rank].append(Span(action, start, end))
        if action.kind is Kind.FORWARD or action.kind in _GRADIENTS:
            forward = action.kind is Kind.FORWARD
            self._made[action.stage, action.microbatch, forward] = (rank, end)

    def _partner(self, rank: int) -> Action | None:
        """The backward that runs with the forward at which `rank` stands."""
        row = self._schedule.ranks[rank]
        following = (a for a in row[self._at[rank] + 1 :] if a.kind in COMPUTE)
        partner = next(following, None)
        return partner if partner is not None and partner.kind in _GRADIENTS else None

    def _perform_pair(self, rank: int, forward: Action, backward: Action, saving: float) -> bool:
        inputs, gradients = self._ready(rank, forward), self._ready(rank, backward)
        if inputs is None or gradients is None:
            return False
        start = max(self._now[rank], inputs, gradients)
        end = start + max(0.0, self._duration(forward) + self._duration(backward) - saving)
        self._record(rank, forward, start, end)
        self._record(rank, backward, start, end)
        self._begun.add(backward)
        return True

    def _ready(self, rank: int, action: Action) -> float | None:
        """When everything that `action` needs has arrived; None: not known yet."""
        stage, microbatch = action.stage, action.microbatch
        needs: list[tuple[int, bool]] = []
        if action.kind is Kind.FORWARD:
            needs += [(stage - 1, True)] * (stage > 0)
        elif action.kind is Kind.WEIGHT_GRADIENT:
            needs += [(stage, False)]
        else:
            needs += [(stage, True)]
            needs += [(stage + 1, False)] * (stage < self._last)
        times = [0.0]
        for other, forward in needs:
            made = self._made.get((other, microbatch, forward))
            if made is None:
                return None
            times.append(made[1] + (self._travel(other, forward) if made[0] != rank else 0.0))
        return max(times)

    def _travel(self, stage: int, forward: bool) -> float:
        costs = self._costs[stage]
        return costs.forward_transfer_s if forward else costs.backward_transfer_s

    def _duration(self, action: Action) -> float:
        costs = self._costs[action.stage]
        if action.kind is Kind.FORWARD:
            return costs.forward_s
        half = {
            Kind.INPUT_GRADIENT: costs.input_gradient_s,
            Kind.WEIGHT_GRADIENT: costs.weight_gradient_s,
        }
        return half.get(action.kind, sum(half.values()))


def _peaks(
    schedule: Schedule, costs: tuple[StageCosts, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The most bytes held on each rank, and by each stage.

    Only the order on a rank matters, not the time. Without backward nothing is held.
    """
    stage_peaks: Counter[int] = Counter()
    peaks = []
    for actions in schedule.ranks:
        held: Counter[int] = Counter()
        total = peak = 0
        for action in actions if schedule.has_backward else ():
            change = _change(action, costs[action.stage])
            held[action.stage] += change
            total += change
            peak = max(peak, total)
            stage_peaks[action.stage] = max(stage_peaks[action.stage], held[action.stage])
        peaks.append(peak)
    return tuple(peaks), tuple(stage_peaks[stage] for stage in range(schedule.num_stages))


def _change(action: Action, costs: StageCosts) -> int:
    if action.kind is Kind.FORWARD:
        return costs.activation_bytes
    if action.kind is Kind.BACKWARD:
        return -costs.activation_bytes
    if action.kind is Kind.INPUT_GRADIENT:
        return costs.left_for_weights - costs.activation_bytes
    return -costs.left_for_weights if action.kind is Kind.WEIGHT_GRADIENT else 0
