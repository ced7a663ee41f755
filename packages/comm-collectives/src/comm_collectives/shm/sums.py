"""Reductions over frames. Every rank gets the same bits.

Whichever rank computes an element goes through the ranks in rank order. Long tensors are reduced in
chunks, so that what is received stays in the cache until it is added.

    reduce_to_all(call, flat, "sum")
"""

from collections.abc import Sequence
from contextlib import nullcontext

import torch

from comm_collectives.collectives import reduce_into
from comm_collectives.shm.calls import Call, Room

# Up to this size every rank computes all of it, above each computes a part.
_WHOLE_BYTES = 1 << 17
_NO_CONTEXT = nullcontext()
_CHUNK_BYTES = 1 << 22  # smaller ones cost more hand-overs than they save misses


def reduce_to_all(call: Call, x: torch.Tensor, op: str) -> None:
    """Reduce the flat tensor `x` in place."""
    if x.nbytes <= _WHOLE_BYTES:
        rows = call.calls.rows(x.numel(), x.dtype)
        call.exchange([x] * call.size, rows)
        _reduce(call, rows, x, x, op)
        return
    for chunk in x.split(_CHUNK_BYTES // x.itemsize):
        part = -(-chunk.numel() // call.size)
        parts = [chunk[rank * part : (rank + 1) * part] for rank in range(call.size)]
        own = parts[call.rank]
        rows = call.calls.rows(own.numel(), x.dtype)
        call.exchange(parts, rows)
        _reduce(call, rows, own, own, op)
        call.exchange([own] * call.size, parts)


def reduce(call: Call, x: torch.Tensor, root: int, op: str) -> None:
    """Reduce the flat tensor `x` in place on rank `root`."""
    for chunk in _chunks(x, call.size):
        if call.rank != root:
            call.exchange([chunk if r == root else chunk[:0] for r in range(call.size)], None)
            continue
        rows = call.calls.rows(chunk.numel(), x.dtype)
        call.exchange(None, rows)
        _reduce(call, rows, chunk, chunk, op)


def reduce_parts(call: Call, parts: Sequence[torch.Tensor], out: torch.Tensor, op: str) -> None:
    """Reduce part `r` of every rank on rank r. All are flat; `out` is apart from the parts.

    The parts may differ in length, but all ranks must have the same lengths.
    """
    lengths = [part.nbytes for part in parts]
    per_step = _CHUNK_BYTES // call.size // out.itemsize
    for at in range(0, max([1, *[part.numel() for part in parts]]), per_step):
        sends = [part[at : at + per_step] for part in parts]
        target, own = out[at : at + per_step], parts[call.rank][at : at + per_step]
        rows = call.calls.rows(target.numel(), out.dtype)
        if at:
            call.exchange(sends, rows)
        else:
            call.exchange_checked(sends, rows, counts=lengths)
        _reduce(call, rows, own, target, op)


def _chunks(x: torch.Tensor, size: int) -> Sequence[torch.Tensor]:
    return x.split(max(1, _CHUNK_BYTES // size // x.itemsize)) if x.numel() else [x]


def _reduce(call: Call, rows: Room, own: torch.Tensor, out: torch.Tensor, op: str) -> None:
    if not own.numel():
        return
    values = rows.tensors[:]
    if call.size > 2 and out is own:
        # Its value is needed later than the first one is written.
        values[call.rank].copy_(own)
    else:
        values[call.rank] = own
    # Tensors made in inference mode may be written to in no other; this may be another thread.
    with torch.inference_mode() if out.is_inference() else _NO_CONTEXT:
        reduce_into(out, values, op)
