"""Pipeline schedules as data: what each rank does, in order.

A schedule is a table, so it can be printed, compared, checked and then executed by something that
knows nothing about the policy. The text of an action follows torch's grammar
(`torch.distributed.pipelining`): stage, kind, microbatch.

    2F0        stage 2 runs forward on microbatch 0
    1B3        stage 1 runs backward on microbatch 3
    1I3        the half of it that makes the gradient of the stage's input
    1W3        the half that makes the gradients of its weights
    0SEND_F1   stage 0 sends the outputs of microbatch 1 to stage 1
    1RECV_F1   stage 1 receives them
    1SEND_B1   stage 1 sends their gradients to stage 0
    0RECV_B1   stage 0 receives them

    assert str(Action.parse("2F0")) == "2F0"
"""

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from moe_pipeline._checks import check_type
from moe_pipeline.errors import ScheduleError
from moe_pipeline.schedules.table.costs import StageCosts


class Kind(StrEnum):
    """What an action does; the values are torch's."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"
    SEND_FORWARD = "SEND_F"
    RECV_FORWARD = "RECV_F"
    SEND_BACKWARD = "SEND_B"
    RECV_BACKWARD = "RECV_B"


COMPUTE = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT})
_KINDS = {kind.value: kind for kind in Kind}
_TEXT = re.compile(r"(\d{1,18})([A-Z_]+)(\d{1,18})")


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One thing that one stage does with one microbatch."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    @staticmethod
    def parse(text: str) -> "Action":
        """Read the text of an action.

        Raises:
            ScheduleError: not an action in the grammar, or of a kind that is not known here.
        """
        match = _TEXT.fullmatch(text.strip())
        if match is None or match[2] not in _KINDS:
            kinds = ", ".join(_KINDS)
            raise ScheduleError(
                f"{text!r} is not an action; expected <stage><kind><microbatch> such as 2F0, "
                f"with a kind of {kinds}"
            )
        return Action(int(match[1]), _KINDS[match[2]], int(match[3]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The actions of every rank, in the order in which the rank performs them.

    Attributes:
        name: for messages and pictures.
        num_stages: stages of the model, numbered from 0.
        num_microbatches: microbatches of a step, numbered from 0.
        ranks: for each rank its actions.
        has_backward: whether each forward is to be followed by a backward.
        copies: on how many ranks a stage may lie, each running some of the microbatches (DualPipe:
            2). Whoever runs such a schedule adds up the copies' gradients.
        paired: forwards that may run together with the backward that follows them on their rank,
            so that one hides the other's communication. Running the two in turn is right as well.
    """

    name: str
    num_stages: int
    num_microbatches: int
    ranks: tuple[tuple[Action, ...], ...]
    has_backward: bool = True
    copies: int = 1
    paired: frozenset[Action] = frozenset()

    def __post_init__(self) -> None:
        check_type("name", self.name, str)
        check_type("num_stages", self.num_stages, int)
        check_type("num_microbatches", self.num_microbatches, int)
        check_type("ranks", self.ranks, tuple)

    def places(self) -> dict[tuple[int, int], int]:
        """The rank of each (stage, microbatch): the first rank that computes it."""
        found: dict[tuple[int, int], int] = {}
        for rank, actions in enumerate(self.ranks):
            for action in actions:
                if action.kind in COMPUTE:
                    found.setdefault((action.stage, action.microbatch), rank)
        return found


# What a computation takes from another rank, and what it gives: (receive, send, towards stage).
_FLOW = {
    Kind.FORWARD: (Kind.RECV_FORWARD, Kind.SEND_FORWARD, 1),
    Kind.BACKWARD: (Kind.RECV_BACKWARD, Kind.SEND_BACKWARD, -1),
    Kind.INPUT_GRADIENT: (Kind.RECV_BACKWARD, Kind.SEND_BACKWARD, -1),
}
# Sending rank, receiving rank, and the kind of the receive.
_Link = tuple[int, int, Kind]


def add_transfers(schedule: Schedule, costs: Sequence[StageCosts] | None = None) -> Schedule:
    """Insert the sends and receives that a compute-only schedule implies.

    A send follows the computation that makes the tensors. A receive stands before the computation
    that needs them; earlier, as late as can be, where a link would otherwise have to hold two
    messages. So one send buffer for each link is enough, whatever the order of the computations.
    Neighbouring stages on one rank exchange nothing.

    Args:
        schedule: of computations only.
        costs: of each stage; they decide how late an early receive can stand. None: F, I and W of
            all stages take one slot each, and messages no time.

    Raises:
        ScheduleError: the schedule has transfers already.
    """
    if any(action.kind not in COMPUTE for actions in schedule.ranks for action in actions):
        raise ScheduleError(f"schedule {schedule.name} has sends or receives already")
    table = costs or [StageCosts()] * schedule.num_stages
    lowering = _Lowering(schedule, table)
    ranks = tuple(tuple(lowering.row(rank)) for rank in range(len(schedule.ranks)))
    return replace(schedule, ranks=ranks)


class _Lowering:
    """Finds a place for every receive.

    Why one buffer is enough: put each action at a moment of a run in which no message waits for a
    buffer: computations at their start, sends at the end of theirs, receives not before their
    send and, by their place in the row, before the next send on their link. Every action then waits
    for earlier moments only, the next send for this receive included, so none waits for itself.
    """

    def __init__(self, schedule: Schedule, costs: Sequence[StageCosts]) -> None:
        self._rows = schedule.ranks
        self._places = schedule.places()
        self._costs = costs
        self._starts = self._start_times(schedule)
        self._links: dict[_Link, list[tuple[float, Action]]] = defaultdict(list)
        for rank, actions in enumerate(schedule.ranks):
            for action in actions:
                to = self._peer(action, towards=1)
                if to is not None:
                    recv, _, step = _FLOW[action.kind]
                    receive = Action(action.stage + step, recv, action.microbatch)
                    self._links[rank, to, recv].append((self._end(action), receive))

    def row(self, rank: int) -> Iterator[Action]:
        """The actions of `rank` with its receives and sends."""
        gaps = self._receives(rank)
        for index, action in enumerate(self._rows[rank]):
            yield from (receive for _, late, receive in gaps[index] if late)
            yield action
            yield from (receive for _, late, receive in gaps[index + 1] if not late)
            if self._peer(action, towards=1) is not None:
                yield Action(action.stage, _FLOW[action.kind][1], action.microbatch)

    def _peer(self, action: Action, *, towards: int) -> int | None:
        """The rank that gets (1) or gives (-1) a message of `action`; None: there is no message."""
        if action.kind not in _FLOW:
            return None
        here = self._places[action.stage, action.microbatch]
        step = _FLOW[action.kind][2] * towards
        there = self._places.get((action.stage + step, action.microbatch), here)
        return None if there == here else there

    def _end(self, action: Action) -> float:
        return self._starts.get(action, 0.0) + self._duration(action)

    def _duration(self, action: Action) -> float:
        costs = self._costs[action.stage]
        gradients = (costs.input_gradient_s, costs.weight_gradient_s)
        return {
            Kind.FORWARD: costs.forward_s,
            Kind.BACKWARD: sum(gradients),
            Kind.INPUT_GRADIENT: gradients[0],
            Kind.WEIGHT_GRADIENT: gradients[1],
        }[action.kind]

    def _travel(self, action: Action) -> float:
        """What the message of `action` takes; nothing where it stays on its rank."""
        if self._peer(action, towards=1) is None:
            return 0.0
        costs = self._costs[action.stage]
        forward = action.kind is Kind.FORWARD
        return costs.forward_transfer_s if forward else costs.backward_transfer_s

    def _receives(self, rank: int) -> dict[int, list[tuple[float, bool, Action]]]:
        """By index of the computation that they stand before: (sent at, after the send?, receive).

        A receive that must make room before the computation in front of it has ended stands before
        that one's send, all others after it.
        """
        row = self._rows[rank]
        gaps: dict[int, list[tuple[float, bool, Action]]] = defaultdict(list)
        users: dict[Action, int] = {}
        for index, action in enumerate(row):
            if self._peer(action, towards=-1) is not None:
                receive = Action(action.stage, _FLOW[action.kind][0], action.microbatch)
                users.setdefault(receive, index)
        starts = [self._starts.get(action, 0.0) for action in row]
        for (_, to, _), messages in self._links.items():
            if to == rank:
                place, next_sent = len(row), None
                for sent, receive in reversed(messages):
                    place = min(place, users.pop(receive, place))
                    late = True
                    if next_sent is not None and self._starts:
                        place = min(place, bisect_left(starts, next_sent))
                        late = place == 0 or self._end(row[place - 1]) < next_sent
                    gaps[place].append((sent, late, receive))
                    next_sent = sent
        for receive, index in users.items():  # never sent: the checker will say so
            gaps[index].append((0.0, True, receive))
        for gap in gaps.values():
            gap.sort(key=lambda entry: entry[0])
        return gaps

    def _start_times(self, schedule: Schedule) -> dict[Action, float]:
        """The earliest start of every computation; empty when some never can.

        Neither the simulator nor the checker use this, and both are held against what comes of it.
        """
        starts: dict[Action, float] = {}
        arrived: dict[tuple[int, int, int], float] = {}
        at, now = [0] * len(schedule.ranks), [0.0] * len(schedule.ranks)
        waiting = list(range(len(schedule.ranks)))
        while waiting:
            rank = waiting.pop()
            row = schedule.ranks[rank]
            while at[rank] < len(row):
                action = row[at[rank]]
                step = _FLOW[action.kind][2] if action.kind in _FLOW else 0
                source = (action.stage - step, action.microbatch)
                need = (*source, step)
                if step and source in self._places and need not in arrived:
                    break
                starts[action] = max(now[rank], arrived.get(need, 0.0) if step else 0.0)
                now[rank] = starts[action] + self._duration(action)
                at[rank] += 1
                if step:
                    here = (action.stage, action.microbatch, step)
                    arrived[here] = now[rank] + self._travel(action)
                    waiting.append(self._places.get((action.stage + step, action.microbatch), rank))
        done = all(i == len(row) for i, row in zip(at, schedule.ranks, strict=True))
        return starts if done else {}
