"""What the executor reads from a schedule before it runs it: who talks to whom, and who holds what.

Everything here follows from the schedule alone and is the same on every rank; nothing decides an
order. One thing is worth a proof: when a message from a peer arrives, the peer had performed all
actions before that message's send, so what those received of us is delivered, and may be freed
here. `ExecutionPlan.delivered` counts it. A message counts as received once the computation that
needs it has begun; the receive itself only asks for it.

    plan = ExecutionPlan.of(schedule, rank=1)
    plan.rows[1]                                    # what this process performs
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from moe_pipeline.errors import MoEValueError, ScheduleError
from moe_pipeline.schedules.table import Action, Kind, Schedule, check

SENDS = frozenset({Kind.SEND_FORWARD, Kind.SEND_BACKWARD})
RECEIVES = frozenset({Kind.RECV_FORWARD, Kind.RECV_BACKWARD})
_SPLIT = frozenset({Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT})
# Of each transfer: the step to the stage at its other end, and what that one performs.
_OTHER_END = {
    Kind.SEND_FORWARD: (1, Kind.RECV_FORWARD),
    Kind.RECV_FORWARD: (-1, Kind.SEND_FORWARD),
    Kind.SEND_BACKWARD: (-1, Kind.RECV_BACKWARD),
    Kind.RECV_BACKWARD: (1, Kind.SEND_BACKWARD),
}
MicrobatchKey = tuple[int, int]  # stage, microbatch


@dataclass(frozen=True, slots=True)
class Edge:
    """One direction between this rank and a peer (its row in the schedule)."""

    peer: int
    forward: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionPlan:
    """A checked schedule as one process performs it."""

    schedule: Schedule  # as given
    # by rank the actions that this process performs: one row, or all of them
    rows: Mapping[int, tuple[Action, ...]]
    places: Mapping[MicrobatchKey, int]  # the rank of each (stage, microbatch)
    # (stage, microbatch) whose backward is split into I and W
    split_backwards: frozenset[MicrobatchKey]
    # by edge of the one row, what arrives on it, as receives in order
    expected: Mapping[Edge, tuple[Action, ...]]
    targets: frozenset[Edge]  # the edges on which the one row sends
    edges: Mapping[Action, Edge]  # of each transfer of the one row
    # by receive of the one row, how many messages per edge are then known to have been received by
    # the peer
    delivered: Mapping[Action, Mapping[Edge, int]]

    @staticmethod
    def of(schedule: Schedule, rank: int | None) -> "ExecutionPlan":
        """Prove the schedule and read it, for one rank or (None) for all in one process."""
        problems = check(schedule)
        if problems:
            shown = "; ".join(str(problem) for problem in problems[:5])
            raise ScheduleError(
                f"schedule {schedule.name} has {len(problems)} problems, the first: {shown}"
            )
        if rank is not None and not 0 <= rank < len(schedule.ranks):
            raise MoEValueError(
                f"rank={rank} is not in schedule {schedule.name}, which has ranks "
                f"0..{len(schedule.ranks) - 1}"
            )
        places = schedule.places()
        mine = range(len(schedule.ranks)) if rank is None else (rank,)
        expected: dict[Edge, list[Action]] = defaultdict(list)
        edges: dict[Action, Edge] = {}
        for action in schedule.ranks[rank] if rank is not None else ():
            if action.kind in SENDS | RECEIVES:
                edges[action] = _link(action, places)
            if action.kind in RECEIVES:
                expected[edges[action]].append(action)
        return ExecutionPlan(
            schedule=schedule,
            rows={r: schedule.ranks[r] for r in mine},
            places=places,
            split_backwards=frozenset(_split_backwards(schedule)),
            expected={edge: tuple(actions) for edge, actions in expected.items()},
            targets=frozenset(edge for action, edge in edges.items() if action.kind in SENDS),
            edges=edges,
            delivered={} if rank is None else _delivered(schedule, places, rank),
        )

    def keys(self) -> list[MicrobatchKey]:
        """Every (stage, microbatch) that this process computes."""
        return [key for key, rank in self.places.items() if rank in self.rows]

    def stages(self) -> list[int]:
        """The stages that this process computes for some microbatch."""
        return sorted({stage for stage, _ in self.keys()})

    def is_local(self, stage: int, other: int, microbatch: int) -> bool:
        """Whether two stages run this microbatch on one rank, so that they need no transfer."""
        return self.places[stage, microbatch] == self.places[other, microbatch]

    def acknowledgements(self) -> Iterator[tuple[int, int]]:
        """Who tells whom at the end of a step without backward that all is well, in order.

        The pairs (giver, taker) that concern this process; a rank of a stage gives to those of the
        stage before. Later stages come first, so nobody waits in a circle.
        """
        if self.schedule.has_backward:
            return
        for stage in reversed(range(1, self.schedule.num_stages)):
            pairs = {
                (self.places[stage, m], self.places[stage - 1, m])
                for m in range(self.schedule.num_microbatches)
            }
            for giver, taker in sorted(pairs):
                if giver != taker and (giver in self.rows or taker in self.rows):
                    yield giver, taker

    def stages_of(self, rank: int) -> list[int]:
        """The stages of some rank."""
        return sorted({stage for (stage, _), place in self.places.items() if place == rank})


def other_end(action: Action) -> Action:
    """What the peer of a transfer performs."""
    step, kind = _OTHER_END[action.kind]
    return Action(action.stage + step, kind, action.microbatch)


def stage_holders(schedule: Schedule) -> dict[int, tuple[int, ...]]:
    """The ranks that hold each stage: one, or with copies (DualPipe) several.

    Parameters and gradients of a stage with several holders are theirs together: make a
    `TiedParameters` of the stage over the group of its holders.
    """
    found: dict[int, set[int]] = defaultdict(set)
    for (stage, _), rank in schedule.places().items():
        found[stage].add(rank)
    return {stage: tuple(sorted(found[stage])) for stage in sorted(found)}


def _link(action: Action, places: Mapping[MicrobatchKey, int]) -> Edge:
    other = other_end(action)
    forward = action.kind in (Kind.SEND_FORWARD, Kind.RECV_FORWARD)
    return Edge(places[other.stage, other.microbatch], forward)


def _split_backwards(schedule: Schedule) -> Iterator[MicrobatchKey]:
    for actions in schedule.ranks:
        for action in actions:
            if action.kind in _SPLIT:
                yield action.stage, action.microbatch


def _delivered(
    schedule: Schedule, places: Mapping[MicrobatchKey, int], rank: int
) -> dict[Action, Mapping[Edge, int]]:
    found: dict[Action, Mapping[Edge, int]] = {}
    for peer, row in enumerate(schedule.ranks):
        received: Counter[Edge] = Counter()
        asked: dict[MicrobatchKey, Edge] = {}
        for action in row if peer != rank else ():
            key = (action.stage, action.microbatch)
            if action.kind not in SENDS | RECEIVES:
                used = asked.pop(key, None)
                received.update(() if used is None else (used,))
                continue
            edge = _link(action, places)
            if edge.peer != rank:
                continue
            if action.kind in RECEIVES:
                asked[key] = Edge(peer, edge.forward)
            else:
                found[other_end(action)] = dict(received)
    return found
