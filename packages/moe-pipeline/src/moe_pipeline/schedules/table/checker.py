"""Whether a schedule is right, found without running it.

Shares no code with the executor or the generators: it knows only what an action needs, makes and
frees, and how messages travel. `check` returns every problem it finds, as data.

- *complete*: each stage runs each microbatch forward once and, in training, backward once (whole,
  or split in I and W), and every transfer between ranks happens once;
- *dependencies*: on its rank, an action finds what it needs already made, and not yet freed
  (an output is freed by its send, the saved activations by the backward, what W needs by W);
- *links*: the sends of one rank to another have their receives, in the same order;
- *deadlock*: with `send_buffers` undelivered messages per link and direction at most, every rank
  reaches the end. 0 is a rendezvous: a send ends only when its receive runs. The executor's sends
  do not wait for receives, so a schedule that passes with 1 cannot deadlock there;
- *pair*, and *deadlock* with `edges="pair_fifo"`: what two ranks post to each other on one
  communicator is done in the order in which they post it (`pair_fifo.py`), as NCCL does.

    assert check(one_f_one_b(4, 8), edges="pair_fifo", communicators=1) == []
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, final

from moe_pipeline._checks import check_count, check_type
from moe_pipeline.errors import MoEValueError
from moe_pipeline.schedules.table.links import Link, LinkPost, run_links
from moe_pipeline.schedules.table.pair_fifo import PairRun, Post
from moe_pipeline.schedules.table.schedule import Action, Kind, Schedule

_COMPUTE = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)
_HALVES = (Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)
_SEND = (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)

# A message: what is sent, named by the stage whose input or output gradient it is.
_Message = tuple[str, int, int]
# Something that lies in a rank's memory: its name, stage and microbatch.
_Thing = tuple[str, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        kind: "placement", "completeness", "dependency", "freed", "link", "pair" or "deadlock".
        rank: where, or None when it concerns no single rank.
        index: position in that rank's list, or None.
        message: what is wrong, in a sentence.
    """

    kind: str
    rank: int | None
    index: int | None
    message: str

    def __str__(self) -> str:
        where = "" if self.rank is None else f"rank {self.rank}"
        if self.index is not None:
            where += f", action {self.index}"
        return f"{self.kind}: {where}{': ' if where else ''}{self.message}"


def check(
    schedule: Schedule,
    *,
    send_buffers: int | None = None,
    edges: Literal["links", "pair_fifo", "group_fifo"] = "links",
    communicators: int = 2,
) -> list[Problem]:
    """All problems of `schedule`; an empty list means that it can be executed.

    Args:
        schedule: any table, also a wrong one.
        send_buffers: messages that may be under way per link and direction, or per pair,
            communicator and direction. None: 1 for links, 0 for pairs, which is the hardest.
        edges: what messages travel on. "links": each link has a queue of its own, and a rank stops
            at a send without room. "pair_fifo": a rank stops at no send, but what it posts to a
            peer on a communicator is done in order, and without room a send waits for its receive;
            "group_fifo": in one order for all peers, as NCCL does in groups with a `device_id`.
        communicators: with these two, 1: activations and gradients share one; 2: each has one.

    Raises:
        ValueError: `send_buffers` below 0, other `edges`, other `communicators` than 1 or 2.
    """
    check_type("schedule", schedule, Schedule)
    if edges not in ("links", "pair_fifo", "group_fifo"):
        raise MoEValueError(f"edges={edges!r}; expected 'links', 'pair_fifo' or 'group_fifo'")
    if communicators not in (1, 2):
        raise MoEValueError(f"communicators={communicators!r}; expected 1 or 2")
    if send_buffers is None:
        send_buffers = int(edges == "links")
    check_count("send_buffers", send_buffers, 0)
    places, problems = _place(schedule)
    if problems:
        return problems
    problems += _completeness(schedule, places)
    for rank in range(len(schedule.ranks)):
        problems += _memory(schedule, places, rank)
    problems += _links(schedule, places)
    # A schedule that is wrong already would only report the same fault a second time.
    if problems or edges == "links":
        return problems or _deadlock(schedule, places, send_buffers)
    rows = _posts(schedule, places, communicators)
    run = PairRun(rows, send_buffers, has_one_queue=edges == "group_fifo")
    run.run()
    return _disorders(
        schedule, run, "1 communicator" if communicators == 1 else "2 communicators", send_buffers
    )


@final
class _Places:
    """Which rank each microbatch of each stage lies on: where it is first mentioned."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, int], int] = {}
        self.ranks_of: dict[int, list[int]] = defaultdict(list)

    def note(self, stage: int, microbatch: int, rank: int) -> int:
        """The rank of the two, which is `rank` when they were not known before."""
        if rank not in self.ranks_of[stage]:
            self.ranks_of[stage].append(rank)
        return self._found.setdefault((stage, microbatch), rank)

    def of(self, stage: int, microbatch: int) -> int:
        """Their rank; one that is never mentioned would lie where the stage's first one does."""
        return self._found.get((stage, microbatch), self.ranks_of[stage][0])


def _place(schedule: Schedule) -> tuple[_Places, list[Problem]]:
    """The rank of each stage, and actions that are out of range or on a rank too many."""
    places = _Places()
    problems = []
    for rank, actions in enumerate(schedule.ranks):
        for index, action in enumerate(actions):
            text = _misplaced(action, rank, schedule, places)
            if text:
                problem = Problem(kind="placement", rank=rank, index=index, message=text)
                problems.append(problem)
    for stage in range(schedule.num_stages):
        if not places.ranks_of[stage]:
            text = f"stage {stage} is on no rank"
            problems.append(Problem(kind="placement", rank=None, index=None, message=text))
    return places, problems


def _misplaced(action: Action, rank: int, schedule: Schedule, places: _Places) -> str:
    """What is wrong with the place of `action`, "" if nothing; notes the place if in range."""
    stage, microbatch = action.stage, action.microbatch
    if not 0 <= stage < schedule.num_stages:
        return f"{action}: stage is outside 0..{schedule.num_stages - 1}"
    if not 0 <= microbatch < schedule.num_microbatches:
        return f"{action}: microbatch is outside 0..{schedule.num_microbatches - 1}"
    before = places.note(stage, microbatch, rank)
    ranks = places.ranks_of[stage]
    if before == rank and ranks.index(rank) < schedule.copies:
        return ""
    if schedule.copies == 1:
        return f"{action}: stage {stage} is on rank {ranks[0]} already"
    if before != rank:
        return f"{action}: microbatch {microbatch} of stage {stage} is on rank {before} already"
    return f"{action}: stage {stage} has {schedule.copies} copies and is on ranks {ranks}"


def _expected(schedule: Schedule, places: _Places) -> Iterator[Action]:
    halved = {
        (action.stage, action.microbatch)
        for actions in schedule.ranks
        for action in actions
        if action.kind in _HALVES
    }
    last = schedule.num_stages - 1
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            here = places.of(stage, microbatch)
            from_before = stage > 0 and places.of(stage - 1, microbatch) != here
            to_next = stage < last and places.of(stage + 1, microbatch) != here
            kinds = [Kind.FORWARD]
            kinds += [Kind.RECV_FORWARD] * from_before + [Kind.SEND_FORWARD] * to_next
            if schedule.has_backward:
                kinds += _HALVES if (stage, microbatch) in halved else [Kind.BACKWARD]
                kinds += [Kind.SEND_BACKWARD] * from_before + [Kind.RECV_BACKWARD] * to_next
            for kind in kinds:
                yield Action(stage, kind, microbatch)


def _completeness(schedule: Schedule, places: _Places) -> list[Problem]:
    found = Counter(action for actions in schedule.ranks for action in actions)
    expected = set(_expected(schedule, places))
    problems = []
    for action in sorted(expected | set(found)):
        wanted = int(action in expected)
        if found[action] != wanted:
            text = f"{action} occurs {found[action]} times, expected {wanted}"
            rank = places.of(action.stage, action.microbatch)
            problems.append(Problem(kind="completeness", rank=rank, index=None, message=text))
    return problems


@dataclass(frozen=True, slots=True)
class _Effect:
    needs: tuple[_Thing, ...]
    makes: tuple[_Thing, ...]
    frees: tuple[_Thing, ...]


# Of each transfer what it needs, makes and frees.
_TRANSFER_EFFECTS = {
    Kind.RECV_FORWARD: ((), ("input",), ()),
    Kind.SEND_FORWARD: (("output",), (), ("output",)),
    Kind.RECV_BACKWARD: (("saved",), ("output gradient",), ()),
    Kind.SEND_BACKWARD: (("input gradient",), (), ("input gradient",)),
}


def _effect(action: Action, schedule: Schedule, places: _Places) -> _Effect:
    """What an action needs, makes and frees on its rank."""
    stage, microbatch = action.stage, action.microbatch
    first, last = stage == 0, stage == schedule.num_stages - 1

    def thing(name: str, owner: int = stage) -> _Thing:
        return (name, owner, microbatch)

    def local(other: int) -> bool:
        return places.of(other, microbatch) == places.of(stage, microbatch)

    if action.kind in _TRANSFER_EFFECTS:
        needed, made, freed = _TRANSFER_EFFECTS[action.kind]
        return _Effect(*(tuple(map(thing, names)) for names in (needed, made, freed)))
    if action.kind is Kind.WEIGHT_GRADIENT:
        kept = (thing("work on weights"),)
        return _Effect(kept, (), kept)
    if action.kind is Kind.FORWARD:
        needs = (thing("input"),) * (not first)
        makes = (thing("saved"),) * schedule.has_backward
        if not last:
            makes += (thing("input", stage + 1) if local(stage + 1) else thing("output"),)
        return _Effect(needs, makes, needs)
    needs = (thing("saved"), *(() if last else (thing("output gradient"),)))
    makes = (thing("work on weights"),) * (action.kind is Kind.INPUT_GRADIENT)
    if not first:
        before = local(stage - 1)
        makes += (thing("output gradient", stage - 1) if before else thing("input gradient"),)
    return _Effect(needs, makes, needs)


def _memory(schedule: Schedule, places: _Places, rank: int) -> list[Problem]:
    """Follow one rank's memory: use before making, use after freeing, making twice."""
    present: set[_Thing] = set()
    freed: set[_Thing] = set()
    problems = []

    def report(kind: str, index: int, text: str) -> None:
        problems.append(Problem(kind=kind, rank=rank, index=index, message=text))

    for index, action in enumerate(schedule.ranks[rank]):
        effect = _effect(action, schedule, places)
        for thing in effect.needs:
            if thing in freed:
                report("freed", index, f"{action} needs the {_name(thing)}, freed before")
            elif thing not in present:
                report("dependency", index, f"{action} needs the {_name(thing)}, not there yet")
        for thing in effect.makes:
            if thing in present or thing in freed:
                report("dependency", index, f"{action} makes the {_name(thing)} a second time")
        present.update(effect.makes)
        present.difference_update(effect.frees)
        freed.update(effect.frees)
    return problems


def _name(thing: _Thing) -> str:
    name, stage, microbatch = thing
    return f"{name} of stage {stage}, microbatch {microbatch}"


def _message(action: Action, places: _Places) -> tuple[Link, _Message] | None:
    """The link that a transfer uses and the message it carries; None for a computation.

    A transfer whose peer would be outside the pipeline or on the same rank has no link either; the
    completeness check reports it.
    """
    if action.kind in _COMPUTE:
        return None
    forward = action.kind in (Kind.SEND_FORWARD, Kind.RECV_FORWARD)
    sends = action.kind in _SEND
    # Activations go from s to s + 1, gradients from s to s - 1.
    step = (1 if forward else -1) * (1 if sends else -1)
    if not places.ranks_of.get(action.stage + step):
        return None
    peer = places.of(action.stage + step, action.microbatch)
    here = places.of(action.stage, action.microbatch)
    if peer == here:
        return None
    direction = "F" if forward else "B"
    receiver_stage = action.stage + step if sends else action.stage
    link = (here, peer, direction) if sends else (peer, here, direction)
    return link, (direction, receiver_stage, action.microbatch)


def _links(schedule: Schedule, places: _Places) -> list[Problem]:
    sent: dict[Link, list[_Message]] = defaultdict(list)
    received: dict[Link, list[_Message]] = defaultdict(list)
    for actions in schedule.ranks:
        for action in actions:
            transfer = _message(action, places)
            if transfer is not None:
                (sent if action.kind in _SEND else received)[transfer[0]].append(transfer[1])
    problems = []
    for link in sorted(set(sent) | set(received)):
        ours, theirs = sent[link], received[link]
        if ours == theirs:
            continue
        at = next(
            (i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]),
            min(len(ours), len(theirs)),
        )
        text = (
            f"link {link[0]}->{link[1]} ({link[2]}): message {at} is sent as "
            f"{_describe(ours, at)} and received as {_describe(theirs, at)}"
        )
        problems.append(Problem(kind="link", rank=link[1], index=None, message=text))
    return problems


def _describe(messages: list[_Message], at: int) -> str:
    if at >= len(messages):
        return "nothing"
    _, stage, microbatch = messages[at]
    return f"microbatch {microbatch} for stage {stage}"


def _deadlock(schedule: Schedule, places: _Places, send_buffers: int) -> list[Problem]:
    """Messages of a link are only counted: `_links` has shown that they are received in order."""
    rows: list[list[LinkPost | None]] = []
    for actions in schedule.ranks:
        transfers = [(action, _message(action, places)) for action in actions]
        rows.append(
            [None if found is None else (found[0], a.kind in _SEND) for a, found in transfers]
        )
    at = run_links(rows, send_buffers)
    return _stuck(schedule, at, f"with {send_buffers} send buffers")


def _stuck(schedule: Schedule, at: Sequence[int], how: str) -> list[Problem]:
    rows = zip(schedule.ranks, at, strict=True)
    return [
        Problem(
            kind="deadlock", rank=rank, index=index, message=f"{row[index]} waits for ever {how}"
        )
        for rank, (row, index) in enumerate(rows)
        if index < len(row)
    ]


def _posts(schedule: Schedule, places: _Places, communicators: int) -> list[list[Post | None]]:
    rows: list[list[Post | None]] = []
    for rank, actions in enumerate(schedule.ranks):
        row: list[Post | None] = []
        for action in actions:
            transfer = _message(action, places)
            if transfer is None:
                row.append(None)
                continue
            (sender, receiver, direction), message = transfer
            group = 0 if communicators == 1 or direction == "F" else 1
            peer = receiver if rank == sender else sender
            row.append(Post(peer, group, action.kind in _SEND, message))
        rows.append(row)
    return rows


def _disorders(schedule: Schedule, run: PairRun, on: str, send_buffers: int) -> list[Problem]:
    problems = [
        Problem(
            kind="pair",
            rank=rank,
            index=index,
            message=f"{schedule.ranks[rank][index]} takes what was sent as another message, in the "
            f"order of transfers on {on}",
        )
        for rank, index in run.crossed
    ]
    how = f"where transfers are done in order, on {on} with {send_buffers} send buffers"
    return problems or _stuck(schedule, run.at, how)
