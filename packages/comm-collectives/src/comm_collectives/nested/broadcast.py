"""Broadcast of nested values with tensors in them, without pickle and without guessing sizes.

The structure travels as JSON, small tensors in chunks behind it, the first with the structure, big
ones by themselves straight into their place.

    state = broadcast_nested({"step": 3, "rng": rng_state} if rank == 0 else None, src=0)
"""

import struct
from collections.abc import Sequence
from typing import Unpack, overload

import torch

from comm_collectives._torch_private import graph_break
from comm_collectives.base import as_bytes, dense
from comm_collectives.call import Agreed, Call, Checks
from comm_collectives.call.groups import Group, check_root, group_state
from comm_collectives.call.handles import CallLater, CallNow, Handle, launch
from comm_collectives.call.signature import Argument
from comm_collectives.collectives import broadcast_bytes, checked_device
from comm_collectives.nested.codec import Packed, decode, encode
from comm_collectives.nested.packing import (
    Buffer,
    Chunk,
    Packer,
    Table,
    Unpacker,
    describe,
    make_plan,
)
from comm_collectives.nested.sharing import Cargo, find_cargo
from comm_collectives.units import TENSOR_BYTES, round_up

_LENGTHS = struct.Struct("<2q")  # bytes of the text, of the table


@overload
def broadcast_nested(
    obj: object, *, src: int, device: torch.device | str | None = ..., **options: Unpack[CallNow]
) -> object: ...
@overload
def broadcast_nested(
    obj: object, *, src: int, device: torch.device | str | None = ..., **options: Unpack[CallLater]
) -> Handle[object]: ...
@graph_break
def broadcast_nested(
    obj: object,
    *,
    src: int,
    group: Group | None = None,
    device: torch.device | str | None = None,
    timeout_s: float | None = None,
    async_op: bool = False,
) -> object:
    """Return, on every rank, the value that rank `src` gave. Collective.

    Supported: None, bool, int, float, complex, str, bytes, enums, numpy scalars, torch's dtypes and
    devices, plain tensors of every dtype, Parameters, and lists, tuples, torch.Size, sets, dicts,
    OrderedDicts (with attributes, as a state dict's `_metadata`), namedtuples and dataclasses
    (rebuilt from their fields; no constructor runs), kept as they are.

    A container, tensor or bytes object that occurs twice arrives as one. Tensors that share memory
    on `src` share it on the receivers where that makes nothing larger (see `nested/sharing.py`).
    Tensors carry no gradient history; those without gaps keep their strides, others arrive
    contiguous. On `src` tensors share memory with the given ones, unless moved to another device.

    Memory besides the value: a chunk of 1 to 4 MiB, the structure as text, and one large tensor
    with gaps, or that changes device, at a time.

    Args:
        obj: the value on `src`; ignored elsewhere.
        src: rank inside the group.
        group: None is the default group.
        device: where this rank wants its tensors; None leaves each on the kind of device that it
            has on `src`, if the group can move data there, else on the host.
        timeout_s: limit in seconds for each transfer; None is the group's own limit.
        async_op: return a Handle at once; its `wait` returns the value.

    Raises:
        RefusedError: `src` is not a rank of the group, a rank does not have its `device`, or
            `obj` contains itself or is nested too deeply (on every rank).
        RefusedTypeError: a part of the value cannot be sent (on every rank, with the path to it).
        TypeError: on a receiver, a class is unknown or has other fields.
        MismatchError: ranks differ in `src` or make different calls (on every rank).
        CommError: a transfer failed; see the subclasses.
    """
    state, packed, place = group_state(group), None, None
    with Checks() as checks:
        check_root(state, src, "src")
        checks.arguments = (Argument("src", int(src)),)
        place = checked_device(device)
        packed = encode(obj) if state.rank == src else None

    def run() -> object:
        call = checks.call(state, "broadcast_nested", timeout_s, compares_site=False)
        return _receive(call, src, place) if packed is None else _send(call, src, packed, place)

    inputs = packed.tensors if packed else []
    return launch(state, "broadcast_nested", run, inputs=inputs, async_op=async_op)


def _send(call: Call, src: int, packed: Packed, device: torch.device | None) -> object:
    cargo = find_cargo(packed.tensors)
    size = call.state.size
    if size > 1:
        table = describe(cargo, len(packed.tensors), packed.blobs, call.state.transport_type)
        plan, words = make_plan(table), table.to_json()
        packer = Packer(cargo.items, packed.blobs)
        head = b"".join((_LENGTHS.pack(len(packed.text), len(words)), packed.text, words))
        offset = round_up(len(head), TENSOR_BYTES)
        buffer = Buffer.of(offset + plan.chunks[0].num_bytes)
        buffer.memory[: len(head)] = head
        packer.fill(buffer.behind(offset), plan.chunks[0])
        flat = buffer.flat
        call.exchange([flat] * size, lambda agreed: [flat[:n] for n in agreed.sizes])
        buffer = _room_for(plan.chunks[1:])
        for chunk in plan.chunks[1:]:
            packer.fill(buffer, chunk)
            broadcast_bytes(call, buffer.flat[: chunk.num_bytes], src)
        for group, number in plan.big:
            broadcast_bytes(call, as_bytes(dense(cargo.items[number])).to(group.kind), src)
    return decode(packed.text, _own(packed.tensors, cargo, device), packed.blobs)


def _receive(call: Call, src: int, device: torch.device | None) -> object:
    size, buffer = call.state.size, _room_for(())

    def place(agreed: Agreed) -> list[torch.Tensor]:
        nonlocal buffer
        buffer = Buffer.of(agreed.sizes[src])
        return [buffer.flat[:n] for n in agreed.sizes]  # only the source has any

    call.exchange([buffer.flat] * size, place)
    text_bytes, words_bytes = _LENGTHS.unpack_from(buffer.memory)
    offset = round_up(_LENGTHS.size + text_bytes + words_bytes, TENSOR_BYTES)
    head = bytes(buffer.memory[_LENGTHS.size : offset])
    table = Table.from_json(head[text_bytes : text_bytes + words_bytes])
    unpacker = Unpacker(table, device)
    plan = make_plan(table)
    unpacker.take(buffer.behind(offset), plan.chunks[0])
    buffer = _room_for(plan.chunks[1:])
    for chunk in plan.chunks[1:]:
        broadcast_bytes(call, buffer.flat[: chunk.num_bytes], src)
        unpacker.take(buffer, chunk)
    for group, number in plan.big:
        flat = torch.empty(group.item_bytes, dtype=torch.uint8, device=group.kind)
        broadcast_bytes(call, flat, src)
        unpacker.take_big(flat, group, number)
    return decode(head[:text_bytes], unpacker.tensors(), unpacker.blobs())


def _room_for(chunks: Sequence[Chunk]) -> Buffer:
    return Buffer.of(max((chunk.num_bytes for chunk in chunks), default=0))


def _own(
    tensors: Sequence[torch.Tensor], cargo: Cargo, device: torch.device | None
) -> list[torch.Tensor]:
    """What the source itself gets: the same memory, or what becomes of it on another device."""
    own = {number: tensor.detach() for number, tensor in enumerate(tensors)}
    if device is not None:
        items = cargo.items.items()
        moved = {number: dense(x).to(device) for number, x in items if x.device != device}
        views = [view for view in cargo.views if view.base in moved]
        own |= moved | {view.number: view.of(moved[view.base]) for view in views}
    return [own[number] for number in range(len(tensors))]
