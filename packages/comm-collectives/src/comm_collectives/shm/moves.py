"""Moving bytes in shared steps: who writes what where, and who reads it.

Each collective is a generator that yields wherever it needs all ranks to have announced the step;
whoever runs it does the waiting, and may hand it to another thread there. All ranks take the same
number of steps because they compute it from what all have said.

    for _ in broadcast(channel, Head("broadcast", x.dtype, "", x.nbytes, root), span_of(x), root):
        channel.arrived(deadline)
"""

import ctypes
import itertools
import math
import struct
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import torch

from comm_collectives.errors import MismatchError, RefusedError
from comm_collectives.shm.channel import Channel
from comm_collectives.shm.heads import HEAD_BYTES, REFUSED, Head, check_heads
from comm_collectives.units import CACHE_LINE_BYTES, round_up

Steps = Iterator[None]


class Span(NamedTuple):
    """Contiguous bytes of this process."""

    address: int
    num_bytes: int


class Piece(NamedTuple):
    """A span whose `stride` bytes a step lie at `offset` in the slot of `rank`."""

    span: Span
    rank: int
    offset: int
    stride: int


def count_steps(num_bytes: int, channel: Channel) -> int:
    """How many steps so many bytes of one rank take; at least one."""
    return max(1, math.ceil(num_bytes / channel.capacity))


def cut(lengths: Sequence[int], steps: int) -> list[tuple[int, int]]:
    """Lay the segments of one rank side by side in its slot: (offset, bytes a step) of each."""
    places, offset = [], 0
    for length in lengths:
        stride = round_up(-(-length // steps), CACHE_LINE_BYTES)
        places.append((offset, stride))
        offset += stride
    return places


def broadcast_steps(channel: Channel, head: Head, span: Span, root: int) -> Steps:
    """The bytes of `root` come to lie in the spans of all others."""
    pieces = _even(channel, [(span, root)], span.num_bytes)
    if channel.rank == root:
        return move(channel, head, pieces, [])
    return move(channel, head, [], pieces)


def all_gather_steps(channel: Channel, head: Head, source: Span, targets: Sequence[Span]) -> Steps:
    """Target `r` of every rank receives the source of rank r; all have one size."""
    me = channel.rank
    writes = _even(channel, [(source, me)], source.num_bytes)
    others = [(target, rank) for rank, target in enumerate(targets) if rank != me]
    reads = _even(channel, others, source.num_bytes)
    return move(channel, head, writes, reads, (targets[me], source))


def gather_steps(
    channel: Channel, head: Head, source: Span, targets: Sequence[Span], root: int
) -> Steps:
    """Target `r` of `root` receives the source of rank r; the others have no targets."""
    if channel.rank == root:
        others = [(target, rank) for rank, target in enumerate(targets) if rank != root]
        reads = _even(channel, others, source.num_bytes)
        return move(channel, head, [], reads, (targets[root], source))
    return move(channel, head, _even(channel, [(source, channel.rank)], source.num_bytes), [])


def scatter_steps(
    channel: Channel, head: Head, sources: Sequence[Span], target: Span, root: int
) -> Steps:
    """Source `r` of `root` goes to the target of rank r; the others have no sources."""
    lengths = without(root, [target.num_bytes] * channel.size)
    places = cut(lengths, count_steps(sum(lengths), channel))
    if channel.rank == root:
        writes = pieces(root, sources, places)
        return move(channel, head, writes, [], (target, sources[root]))
    offset, stride = places[channel.rank]
    return move(channel, head, [], [Piece(target, root, offset, stride)] if stride else [])


def move(
    channel: Channel,
    head: Head,
    writes: Sequence[Piece],
    reads: Sequence[Piece],
    own: tuple[Span, Span] | None = None,
) -> Steps:
    """Move bytes whose layout follows from the call alone; `own` is (target, source) of this rank.

    In a slot the pieces lie at their offsets; each piece takes its bytes divided by its stride.
    """
    packed = head.pack()
    steps = max([-(-piece.span.num_bytes // piece.stride) for piece in (*writes, *reads)] or [1])
    for step in range(steps):
        fill(channel, writes, step)
        channel.announce(None if step else packed)
        if step == 0 and own is not None:
            copy(own[0].address, own[1].address, own[0].num_bytes)
        yield
        if step == 0:
            agree(channel, packed)
        drain(channel, reads, step)


def swap(channel: Channel, head: Head, sends: Sequence[Span], receives: Sequence[Span]) -> Steps:
    """All-to-all: span `r` of `sends` goes to rank r, span `r` of `receives` comes from it.

    The sizes may all differ; what one rank sends must be what the other expects. Only after the
    first step do all know how many there are; what fits into one travels in that one.
    """
    me, size = channel.rank, channel.size
    packed, table = head.pack(), _table(size)
    others = without(me, [span.num_bytes for span in sends])
    if sum(others) <= channel.capacity:
        fill(channel, pieces(me, sends, cut(others, 1)), 0)
    told = packed + table.pack(*[span.num_bytes for span in (*sends, *receives)])
    channel.announce(told)
    copy(receives[me].address, sends[me].address, receives[me].num_bytes)
    yield
    heads = channel.heads(len(told))
    check_heads(packed, [head[:HEAD_BYTES] for head in heads], channel.names)
    tables = [table.unpack_from(head, HEAD_BYTES) for head in heads]
    _check_tables(tables, channel.names)
    rows = [without(rank, row[:size]) for rank, row in enumerate(tables)]
    steps = max([count_steps(sum(row), channel) for row in rows])
    places = [cut(row[: me + 1], steps)[me] for row in rows]
    reads = [Piece(receives[rank], rank, *places[rank]) for rank in range(size) if rank != me]
    if steps == 1:
        drain(channel, reads, 0)
        return
    writes = pieces(me, sends, cut(others, steps))
    for step in range(steps):
        fill(channel, writes, step)
        channel.announce()
        yield
        drain(channel, reads, step)


def meet(channel: Channel, head: Head) -> Steps:
    """One step without data."""
    packed = head.pack()
    channel.announce(packed)
    yield
    agree(channel, packed)


def refuse(channel: Channel, error: RefusedError) -> Steps:
    """Let the others know that this rank's arguments are wrong, and raise `error` here."""
    channel.announce(Head(REFUSED).pack())
    yield
    raise error


def agree(channel: Channel, packed: bytes) -> None:
    """Check that all ranks announced the same call.

    Raises:
        MismatchError: they did not; on every rank.
    """
    check_heads(packed, channel.heads(HEAD_BYTES), channel.names)


def span_of(x: torch.Tensor) -> Span:
    """Where the bytes of a contiguous tensor are."""
    return Span(x.data_ptr(), x.nbytes)


def spans_of(flat: torch.Tensor, sizes: Sequence[int]) -> list[Span]:
    """Cut the bytes of a flat tensor into spans of so many bytes."""
    ends = itertools.accumulate(sizes)
    start = flat.data_ptr()
    return [Span(start + end - size, size) for end, size in zip(ends, sizes, strict=True)]


def shifted(span: Span, num_bytes: int) -> Span:
    """Return what of a span lies `num_bytes` and more behind its start."""
    return Span(span.address + num_bytes, max(0, span.num_bytes - num_bytes))


def _even(channel: Channel, spans: Sequence[tuple[Span, int]], num_bytes: int) -> list[Piece]:
    """Spans of one size, each of which has the slot of its rank for itself."""
    stride = cut([num_bytes], count_steps(num_bytes, channel))[0][1]
    return [Piece(span, rank, 0, stride) for span, rank in spans if stride]


def without(me: int, lengths: Sequence[int]) -> list[int]:
    """What a rank keeps for itself takes no room in its slot."""
    return [0 if rank == me else length for rank, length in enumerate(lengths)]


def pieces(me: int, spans: Sequence[Span], places: Sequence[tuple[int, int]]) -> list[Piece]:
    """Give each span its place in the slot of rank `me`."""
    return [
        Piece(span, me, offset, stride)
        for span, (offset, stride) in zip(spans, places, strict=True)
        if stride
    ]


def fill(channel: Channel, pieces: Sequence[Piece], step: int) -> None:
    """Copy this step's bytes of each piece into this rank's slot."""
    slot = channel.mine()
    for piece in pieces:
        start = step * piece.stride
        num_bytes = min(piece.stride, piece.span.num_bytes - start)
        copy(slot + piece.offset, piece.span.address + start, num_bytes)


def drain(channel: Channel, pieces: Sequence[Piece], step: int) -> None:
    """Copy this step's bytes of each piece out of its rank's slot."""
    for piece in pieces:
        start = step * piece.stride
        num_bytes = min(piece.stride, piece.span.num_bytes - start)
        copy(piece.span.address + start, channel.theirs(piece.rank) + piece.offset, num_bytes)


def copy(target: int, source: int, num_bytes: int) -> None:
    """Copy bytes without the GIL."""
    if num_bytes > 0 and target != source:
        ctypes.memmove(target, source, num_bytes)


@cache
def _table(size: int) -> struct.Struct:
    """The bytes that a rank sends to each rank, and those that it expects from each."""
    return struct.Struct(f"<{2 * size}q")


def _check_tables(tables: Sequence[Sequence[int]], names: Sequence[int]) -> None:
    """Check that each rank sends to each other one what that one expects; alike on every rank."""
    size = len(tables)
    if len({*itertools.chain(*tables)}) == 1:
        return
    wrong = [
        f"rank {names[src]} sends {tables[src][dst]} bytes to rank {names[dst]}, "
        f"which expects {tables[dst][size + src]}"
        for src in range(size)
        for dst in range(size)
        if tables[src][dst] != tables[dst][size + src]
    ]
    if wrong:
        raise MismatchError("; ".join(wrong))
