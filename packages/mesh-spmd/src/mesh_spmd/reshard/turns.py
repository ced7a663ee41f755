"""A step in turns: which parts of its messages travel at once, so that buffers stay small.

A pair's messages of a turn are a run of all that it exchanges in the step; which run a turn takes
differs from peer to peer, so that many short messages do not all travel in the first turn. Addends
are cut by what the receiver gets of a box: all addends of an element arrive in one turn and are
reduced in it.

Invariant: both ends cut alike, and each element travels in one turn.

    buffers_of(step, rank)     # Buffers(addends=..., outgoing=..., incoming=...), in bytes
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from mesh_spmd.layout import TensorSpec
from mesh_spmd.reshard.messages import Piece, copy_of, receives_of, sends_of
from mesh_spmd.reshard.moves import Reduction
from mesh_spmd.reshard.steps import Step

ByPeer = dict[int, list[Piece]]


class AddendBox(NamedTuple):
    """Elements `begin` to `end` of a box, whose addends arrive in one turn.

    In coordinates in which the target begins at `shift`.
    """

    target: int
    shift: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    begin: int
    end: int


class Buffers(NamedTuple):
    """The bytes of a rank's buffers, which all turns of a step share. Addends come first."""

    addends: int
    outgoing: int
    incoming: int


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Turn:
    """One rank's part of one exchange: pieces by peer, in the order in which they are packed.

    `copies` are what it adds to reductions itself in this turn.
    """

    outgoing: ByPeer
    incoming: ByPeer
    copies: list[Piece]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Schedule:
    """What one rank does in a step: copies that are no addends, then turns."""

    copies: list[Piece]
    turns: list[Turn]
    buffers: Buffers


@lru_cache(maxsize=8)
def schedule_of(step: Step, rank: int) -> Schedule:
    """Return what `rank` does in a step."""
    sends: ByPeer = defaultdict(list)
    receives: ByPeer = defaultdict(list)
    copies: list[Piece] = []
    for number, (move, shares) in enumerate(zip(step.moves, step.shares, strict=True)):
        for piece in sends_of(move, number, shares, rank):
            sends[piece.peer].append(piece)
        for piece in receives_of(move, number, shares, rank):
            receives[piece.peer].append(piece)
        copies += copy_of(move, number, rank)
    # A pair may have several pieces of a move; both ends take them in the order of its elements.
    for pieces in (*sends.values(), *receives.values()):
        pieces.sort(key=lambda p: (p.move, p.offset, p.begin))
    turns = [Turn(outgoing={}, incoming={}, copies=[]) for _ in range(step.rounds)]
    for peer, pieces in sends.items():
        for at, piece in _in_turns(step, pieces, rank + peer):
            turns[at].outgoing.setdefault(peer, []).append(piece)
    for peer, pieces in receives.items():
        for at, piece in _in_turns(step, pieces, rank + peer):
            turns[at].incoming.setdefault(peer, []).append(piece)
    for at, piece in _in_turns(step, [p for p in copies if is_addend(step, p)], 0):
        turns[at].copies.append(piece)
    return Schedule(
        copies=[p for p in copies if not is_addend(step, p)],
        turns=turns,
        buffers=_buffers(step, turns),
    )


def buffer_bytes_of(steps: Iterable[Step], rank: int) -> int:
    """Return how many bytes the buffer of `rank` needs, which all steps of a plan share."""
    return max((sum(buffers_of(step, rank)) for step in steps), default=0)


def buffers_of(step: Step, rank: int) -> Buffers:
    """Return how the buffer is parted in a step."""
    if rank not in step.ranks:
        return Buffers(0, 0, 0)
    if step.rounds == 1 and not any(reduction.kinds for reduction in step.reductions):
        # Nothing is cut; the totals are known without a look at messages.
        at = step.ranks.index(rank)
        return Buffers(0, step.sent[at], step.received[at])
    return schedule_of(step, rank).buffers


def result_bytes(step: Step, rank: int, *, later: bool) -> int:
    """Return how many bytes of results `rank` makes in a step.

    Args:
        step: the step.
        rank: the rank.
        later: whether it is not the first one of its plan: what lies as before is not copied.
    """
    return sum(
        local_bytes(target, rank)
        for number, target in enumerate(step.targets)
        if not (later and rests(step, number))
    )


def rests(step: Step, number: int) -> bool:
    """Whether a target lies as its source did, alone and whole."""
    if len(step.sources) != len(step.targets):
        return False
    return step.sources[number] == step.targets[number]


def is_addend(step: Step, piece: Piece) -> bool:
    """Whether a piece is to be reduced with others."""
    return bool(reduction_of(step, piece).kinds)


def reduction_of(step: Step, piece: Piece) -> Reduction:
    """Return how the target of a piece is reduced."""
    return step.reductions[step.moves[piece.move].link.target]


def addend_box(step: Step, piece: Piece, turn: int) -> AddendBox:
    """Return what is reduced in a turn of the box that an addend belongs to."""
    begin, end = piece.whole
    low, high = (begin + (end - begin) * at // step.rounds for at in (turn, turn + 1))
    move = step.moves[piece.move]
    return AddendBox(
        move.link.target, move.target.shift, piece.offset, piece.shape, begin=low, end=high
    )


def addend_boxes(step: Step, turns: Sequence[Turn], turn: int) -> list[AddendBox]:
    """Return all boxes of a turn, wide elements first."""
    here = turns[turn]
    pieces = [p for pieces in here.incoming.values() for p in pieces if is_addend(step, p)]
    found = {addend_box(step, piece, turn) for piece in (*here.copies, *pieces)}
    return sorted(found, key=lambda box: (-step.targets[box.target].dtype.itemsize, box))


def addend_bytes(step: Step, box: AddendBox) -> int:
    """Return the bytes of all addends of a box."""
    count = step.reductions[box.target].num_addends
    return count * (box.end - box.begin) * step.targets[box.target].dtype.itemsize


def local_bytes(tensor: TensorSpec, rank: int) -> int:
    """Return the bytes of `rank`'s part of a tensor."""
    if tensor.mesh.position(rank) is None:
        return 0
    return math.prod(tensor.local_shape(rank)) * tensor.dtype.itemsize


def _in_turns(step: Step, pieces: list[Piece], shift: int) -> Iterator[tuple[int, Piece]]:
    """The parts of a pair's pieces with their turns; `shift` says which turn has the first run."""
    plain = [p for p in pieces if not is_addend(step, p)]
    for at, piece in _runs(step, plain):
        yield (at + shift) % step.rounds, piece
    for piece in pieces:
        if is_addend(step, piece):
            for turn in range(step.rounds):
                box = addend_box(step, piece, turn)
                low, high = max(box.begin, piece.begin), min(box.end, piece.end)
                if low < high:
                    yield turn, piece._replace(begin=low, end=high)


def _runs(step: Step, pieces: list[Piece]) -> Iterator[tuple[int, Piece]]:
    """Pieces cut into as many consecutive runs as there are rounds, of about equal bytes."""
    sizes = [(p.end - p.begin) * step.moves[p.move].dtype.itemsize for p in pieces]
    total, start = sum(sizes), 0
    for piece, size in zip(pieces, sizes, strict=True):
        itemsize = size // (piece.end - piece.begin)
        at, begin = start * step.rounds // total, piece.begin
        while begin < piece.end:
            # Up to the first element that begins at or behind the end of the run.
            edge = -(-total * (at + 1) // step.rounds)
            end = min(piece.end, max(begin, piece.begin - (start - edge) // itemsize))
            if begin < end:
                yield at, piece._replace(begin=begin, end=end)
            begin, at = end, at + 1
        start += size


def _buffers(step: Step, turns: Sequence[Turn]) -> Buffers:
    def most(side: Iterable[Iterable[list[Piece]]]) -> int:
        return max(
            sum(
                (p.end - p.begin) * step.moves[p.move].dtype.itemsize
                for pieces in of_turn
                for p in pieces
            )
            for of_turn in side
        )

    return Buffers(
        addends=max(
            sum(addend_bytes(step, box) for box in addend_boxes(step, turns, at))
            for at in range(len(turns))
        ),
        outgoing=most(turn.outgoing.values() for turn in turns),
        incoming=most(turn.incoming.values() for turn in turns),
    )
