"""Reductions in shared steps. Every rank gets the same bits.

Whichever rank computes an element goes through the ranks in rank order. For the terms see
`shm_moves`.

    for _ in all_reduce(channel, Head("all_reduce", x.dtype, "sum", x.nbytes), x, reduction):
        channel.arrived(deadline)
"""

import struct
from collections.abc import Sequence

import torch

from comm_collectives.errors import MismatchError
from comm_collectives.shm.channel import Channel
from comm_collectives.shm.heads import HEAD_BYTES, Head
from comm_collectives.shm.moves import (
    Piece,
    Span,
    Steps,
    agree,
    copy,
    count_steps,
    cut,
    drain,
    fill,
    pieces,
    shifted,
    span_of,
    without,
)
from comm_collectives.shm.reductions import Reduction
from comm_collectives.units import CACHE_LINE_BYTES, round_up

# Above this size three ranks or more share the work instead of all doing all of it.
_SHARED_BYTES = 1 << 16


def reduce_scatter_steps(
    channel: Channel,
    head: Head,
    parts: Sequence[torch.Tensor],
    out: torch.Tensor,
    reduction: Reduction,
) -> Steps:
    """Reduce part `r` of every rank on rank r. All are flat; `out` is apart from the parts.

    The parts may differ in length, but all ranks must have the same lengths.
    """
    me, dtype, packed = channel.rank, out.dtype, head.pack()
    lengths = [part.nbytes for part in parts]
    told = packed + struct.pack(f"<{channel.size}q", *lengths)
    # Nobody puts its own part into its slot, so each slot is laid out in its own way.
    rows = [without(rank, lengths) for rank in range(channel.size)]
    steps = max([count_steps(sum(row), channel) for row in rows])
    places = [cut(row, steps) for row in rows]
    writes = pieces(me, [span_of(part) for part in parts], places[me])
    starts = [row[me][0] // out.itemsize for row in places]
    per_step = round_up(-(-out.nbytes // steps), CACHE_LINE_BYTES) // out.itemsize
    for step in range(steps):
        fill(channel, writes, step)
        channel.announce(None if step else told)
        yield
        if step == 0:
            agree(channel, packed)
            _check_lengths(channel, told)
        target = out[step * per_step : (step + 1) * per_step]
        count = target.numel()
        values = [channel.their_tensor(r, dtype)[at : at + count] for r, at in enumerate(starts)]
        values[me] = parts[me][step * per_step : (step + 1) * per_step]
        reduction(values, target)


def all_reduce_steps(channel: Channel, head: Head, x: torch.Tensor, reduction: Reduction) -> Steps:
    """Reduce the flat tensor `x` in place."""
    if channel.size > 2 and x.nbytes > _SHARED_BYTES:
        return _all_reduce_shared(channel, head, x, reduction)
    return _all_reduce_alone(channel, head, x, reduction)


def _all_reduce_alone(channel: Channel, head: Head, x: torch.Tensor, reduction: Reduction) -> Steps:
    """Every rank computes all of it: one step a chunk, and for two ranks no more work."""
    packed = head.pack()
    steps = count_steps(x.nbytes, channel)
    stride = round_up(-(-x.nbytes // steps), CACHE_LINE_BYTES)
    writes = [Piece(span_of(x), channel.rank, 0, stride)]
    per_step = stride // x.itemsize
    # Of two ranks each can use its own values where they are; more would overwrite them too early.
    is_pair = channel.size == 2
    ranks = [1 - channel.rank] if is_pair else range(channel.size)
    for step in range(steps):
        fill(channel, writes, step)
        channel.announce(None if step else packed)
        yield
        if step == 0:
            agree(channel, packed)
        target = x if steps == 1 else x[step * per_step : (step + 1) * per_step]
        count = target.numel()
        values = [channel.their_tensor(rank, x.dtype)[:count] for rank in ranks]
        if is_pair:
            values.insert(channel.rank, target)
        reduction(values, target)


def _all_reduce_shared(
    channel: Channel, head: Head, x: torch.Tensor, reduction: Reduction
) -> Steps:
    """Each rank computes one part of a chunk; the results come one step after the parts.

    A chunk has one part for each rank. In a slot part r is this rank's input for rank r; the place
    of its own part, which nobody needs, holds its result of the chunk before.
    """
    me, size, packed = channel.rank, channel.size, head.pack()
    chunks = count_steps(x.nbytes, channel)
    part_bytes = round_up(-(-x.nbytes // (chunks * size)), CACHE_LINE_BYTES)
    chunk_bytes, part = part_bytes * size, part_bytes // x.itemsize
    whole = span_of(x)
    mine = slice(me * part, (me + 1) * part)
    for step in range(chunks + 1):
        here = shifted(whole, step * chunk_bytes)
        inputs = _parts(here, part_bytes, me, size)
        fill(channel, inputs, 0)
        channel.announce(None if step else packed)
        yield
        if step == 0:
            agree(channel, packed)
        if step:
            before = shifted(whole, (step - 1) * chunk_bytes)
            drain(channel, _parts(before, part_bytes, me, size), 0)
        own = x[step * part * size :][mine]
        if own.numel():
            values = [channel.their_tensor(r, x.dtype)[mine][: own.numel()] for r in range(size)]
            values[me] = own
            result = channel.my_tensor(x.dtype)[mine][: own.numel()]
            reduction(values, result)
            copy(own.data_ptr(), result.data_ptr(), own.nbytes)


def _parts(chunk: Span, part_bytes: int, me: int, size: int) -> list[Piece]:
    """The parts of a chunk that are not this rank's, each in its rank's slot (to be read)."""
    return [
        Piece(shifted(chunk, rank * part_bytes), rank, rank * part_bytes, part_bytes)
        for rank in range(size)
        if rank != me
    ]


def _check_lengths(channel: Channel, told: bytes) -> None:
    heads = channel.heads(len(told))
    if any(head != told for head in heads):
        table = struct.Struct(f"<{channel.size}q")
        given = [list(table.unpack_from(head, HEAD_BYTES)) for head in heads]
        raise MismatchError(
            "the ranks reduce parts of different sizes in bytes: "
            + "; ".join(
                f"rank {name}: {sizes}" for name, sizes in zip(channel.names, given, strict=True)
            )
        )
