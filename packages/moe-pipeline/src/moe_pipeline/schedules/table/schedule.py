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
# A moment of the run in which nothing waits for room: an end, and a number that orders equal ends.
_Moment = tuple[float, int]
# A transfer of a rank: its moment, the peer, and the index of the computation that it follows (a
# send) or the receive.
_Posted = tuple[_Moment, int, int | Action]


def add_transfers(schedule: Schedule, costs: Sequence[StageCosts] | None = None) -> Schedule:
    """Insert the sends and receives that a compute-only schedule implies.

    A send follows the computation that makes the tensors. A receive stands before the computation
    that needs them; earlier, as late as can be, where a link would otherwise have to hold two
    messages, or where this rank has a send that comes later than the message. So one send buffer
    for each link is enough, whatever the order of the computations, and all ranks list their
    transfers, of both directions, in parts of one order: what process groups need in which a send
    waits for its receive (NCCL). Neighbouring stages on one rank exchange nothing.

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

    Why it is enough: take a run in which no message waits for room, and order all transfers by the
    ends of the computations that they follow; among equal ends by the order in which the run was
    found, where causes come first. A rank's row has its sends in this order. A receive is put
    behind all sends that come before it and in front of all that come later, and in front of all
    that this rank begins after the next send on its link. So each row has its transfers in this
    order, and no computation stands in front of a transfer that needs a later one: each action
    waits for earlier ones only, whether sends go into a buffer of one message, wait for their
    receives in a queue of the pair or the group, or stop their rank until then.
    """

    def __init__(self, schedule: Schedule, costs: Sequence[StageCosts]) -> None:
        self._rows = schedule.ranks
        self._places = schedule.places()
        self._costs = costs
        # Of every computation its start, and the moment of its end.
        self._starts: dict[Action, float] = {}
        self._moments: dict[Action, _Moment] = {}
        self._find_moments(schedule)
        self._posted: list[list[_Posted]] = [[] for _ in schedule.ranks]
        for rank, actions in enumerate(schedule.ranks):
            for index, action in enumerate(actions):
                to = self._peer(action, towards=1)
                if to is not None:
                    recv, _, step = _FLOW[action.kind]
                    receive = Action(action.stage + step, recv, action.microbatch)
                    moment = self._moments.get(action, (0.0, 0))
                    self._posted[rank].append((moment, to, index))
                    self._posted[to].append((moment, rank, receive))

    def row(self, rank: int) -> Iterator[Action]:
        """The actions of `rank` with its receives and sends."""
        gaps = self._receives(rank)
        for index, action in enumerate(self._rows[rank]):
            yield from (receive for _, receive in sorted(gaps[2 * index]))
            yield action
            yield from (receive for _, receive in sorted(gaps[2 * index + 1]))
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

    def _receives(self, rank: int) -> dict[int, list[tuple[_Moment, Action]]]:
        """What is received where: by 2 i before computation i, by 2 i + 1 between it and its send.

        With the moments of their sends.
        """
        row = self._rows[rank]
        gaps: dict[int, list[tuple[_Moment, Action]]] = defaultdict(list)
        users: dict[Action, int] = {}
        for index, action in enumerate(row):
            if self._peer(action, towards=-1) is not None:
                receive = Action(action.stage, _FLOW[action.kind][0], action.microbatch)
                users.setdefault(receive, index)
        ends = [self._moments[action] for action in row] if self._moments else []
        place = 2 * len(row)
        next_sent: dict[tuple[int, Kind], _Moment] = {}
        for moment, peer, what in sorted(
            self._posted[rank], key=lambda entry: entry[0], reverse=True
        ):
            if isinstance(what, int):
                place = min(place, 2 * what + 1) if ends else place
                continue
            place = min(place, 2 * users.pop(what, len(row))) if ends else 2 * users.pop(what, 0)
            if (peer, what.kind) in next_sent and ends:
                place = min(place, self._before(row, ends, next_sent[peer, what.kind]))
            gaps[place].append((moment, what))
            next_sent[peer, what.kind] = moment
        for receive, index in users.items():  # never sent: the checker will say so
            gaps[2 * index].append(((0.0, 0), receive))
        return gaps

    def _before(self, row: Sequence[Action], ends: Sequence[_Moment], moment: _Moment) -> int:
        """The last place of a row that it reaches before a moment."""
        index = bisect_left(ends, moment)
        if index == len(row):
            return 2 * index
        return 2 * index + int(self._starts[row[index]] < moment[0])

    def _find_moments(self, schedule: Schedule) -> None:
        """When every computation ends, at the earliest; nothing when some never can.

        Neither the simulator nor the checker use this, and both are held against what comes of it.
        """
        moments: dict[Action, _Moment] = {}
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
                self._starts[action] = max(now[rank], arrived.get(need, 0.0) if step else 0.0)
                now[rank] = self._starts[action] + self._duration(action)
                moments[action] = (now[rank], len(moments))
                at[rank] += 1
                if step:
                    here = (action.stage, action.microbatch, step)
                    arrived[here] = now[rank] + self._travel(action)
                    waiting.append(self._places.get((action.stage + step, action.microbatch), rank))
        if all(i == len(row) for i, row in zip(at, schedule.ranks, strict=True)):
            self._moments = moments
