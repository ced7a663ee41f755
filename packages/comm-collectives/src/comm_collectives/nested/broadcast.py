"""Broadcast of nested values with tensors in them, without pickle and without guessing sizes.

The structure travels as JSON and a table of ints, small tensors in chunks behind it, big ones by
themselves straight into their place. The first bytes travel inline in the control exchange, so a
few scalars need no transfer of their own.

    state = broadcast_nested({"step": 3, "rng": rng_state} if rank == 0 else None, src=0)
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, overload

import torch

from comm_collectives._torch_private import graph_break
from comm_collectives.base import as_bytes, dense
from comm_collectives.call import Call
from comm_collectives.call.groups import Group, GroupState, check_root, group_state
from comm_collectives.call.handles import Handle, launch
from comm_collectives.call.signature import INLINE_BYTES, Argument
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

_LENGTHS = struct.Struct("<3q")  # bytes of the text, of the table, of all up to the second chunk


@overload
def broadcast_nested(
    obj: object,
    *,
    src: int,
    group: Group | None = ...,
    device: torch.device | str | None = ...,
    timeout_s: float | None = ...,
    async_op: Literal[False] = ...,
) -> object: ...
@overload
def broadcast_nested(
    obj: object,
    *,
    src: int,
    group: Group | None = ...,
    device: torch.device | str | None = ...,
    timeout_s: float | None = ...,
    async_op: Literal[True],
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
    on `src` share it on the receivers where that makes nothing larger (`nested/sharing.py` has the
    rule). Of a large storage only what the tensors need travels. Tensors carry no gradient history;
    those without gaps keep their strides, others arrive contiguous. On `src` containers are new and
    tensors share memory with the given ones, unless moved to another device.

    Memory, besides the value: a chunk (a sixteenth of the payload, but 1 to 4 MiB), the structure
    as text, and one large tensor with gaps, or that changes device, at a time.

    Args:
        obj: the value on `src`; ignored elsewhere.
        src: rank inside the group.
        group: None is the default group.
        device: where this rank wants its tensors; None leaves each on the kind of device that it
            has on `src`, if the group can move data there, else on the host.
        timeout_s: limit in seconds for each transfer; None is the group's own limit.
        async_op: return a Handle at once; its `wait` returns the value.

    Raises:
        RefusedError: `src` is not a rank of the group, a rank does not have its `device`, or the
            value contains itself or is nested too deeply (on every rank).
        RefusedTypeError: a part of the value cannot be sent (on every rank, with the path to it).
        TypeError: on a receiver, a class is unknown or has other fields.
        MismatchError: ranks differ in `src` or make different calls (on every rank).
        CommError: a transfer failed; see the subclasses.
    """
    state = group_state(group)
    given = _look_at(state, obj, src, device)
    inputs = given.packed.tensors if given.packed else []

    def run() -> object:
        call = Call(
            state,
            "broadcast_nested",
            arguments=given.arguments,
            timeout_s=timeout_s,
            compares_site=False,
        )
        channel = _Channel(call=call, src=src)
        packed = given.packed
        return _receive(channel, given) if packed is None else _send(channel, packed, given.device)

    return launch(state, "broadcast_nested", run, inputs=inputs, async_op=async_op)


@dataclass(frozen=True, slots=True)
class _Given:
    """What this rank's arguments come to."""

    arguments: tuple[Argument, ...] = ()
    packed: Packed | None = None
    device: torch.device | None = None
    refused: ValueError | TypeError | None = None


def _look_at(state: GroupState, obj: object, src: int, device: torch.device | str | None) -> _Given:
    arguments: tuple[Argument, ...] = ()
    try:
        check_root(state, src, "src")
        arguments = (Argument("src", int(src)),)
        place = checked_device(device)
        return _Given(arguments, encode(obj) if state.rank == src else None, place)
    except (TypeError, ValueError) as error:
        return _Given(arguments, refused=error)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Channel:
    """The way from `src` to all others; the only place that knows of calls and transports."""

    call: Call
    src: int

    @property
    def state(self) -> GroupState:
        """The group as this rank sees it."""
        return self.call.state

    @property
    def kinds(self) -> list[str]:
        """Kinds of device on which the group can move data; alike on every rank."""
        return sorted(self.state.backend_of)

    def meet(self, first: bytes, refused: ValueError | TypeError | None = None) -> bytes:
        """Meet the other ranks, and return the first INLINE_BYTES that the source has to say."""
        parts = [first[:INLINE_BYTES]] * self.state.size
        agreed = self.call.meet(parts=parts, refused=refused)
        return agreed.parts[self.src]

    def broadcast(self, flat: torch.Tensor) -> torch.Tensor:
        """Broadcast a flat uint8 tensor in place."""
        broadcast_bytes(self.call, flat, self.src)
        return flat

    def broadcast_host(self, flat: torch.Tensor) -> None:
        """Broadcast a flat uint8 tensor on the host in place, by way of the group's device."""
        control = self.state.control_type
        if control == "cpu":
            self.broadcast(flat)
        elif self.state.rank == self.src:
            self.broadcast(flat.to(control))
        else:
            flat.copy_(self.broadcast(torch.empty_like(flat, device=control)))


def _send(channel: _Channel, packed: Packed, device: torch.device | None) -> object:
    cargo = find_cargo(packed.tensors)
    if channel.state.size > 1:
        _send_cargo(channel, packed, cargo)
    return decode(packed.text, _own(packed.tensors, cargo, device), packed.blobs)


def _send_cargo(channel: _Channel, packed: Packed, cargo: Cargo) -> None:
    table = describe(cargo, len(packed.tensors), packed.blobs, channel.state.transport_type)
    plan = make_plan(table)
    packer = Packer(cargo.items, packed.blobs)
    first, *others = plan.chunks
    words = table.to_bytes(channel.kinds)
    offset = round_up(_LENGTHS.size + len(packed.text) + len(words), TENSOR_BYTES)
    total = offset + first.num_bytes
    lengths = _LENGTHS.pack(len(packed.text), len(words), total)
    head = b"".join((lengths, packed.text, words))
    buffer = Buffer.of(max(total, INLINE_BYTES))
    buffer.memory[: len(head)] = head
    packer.fill(buffer.behind(offset), first)
    channel.meet(bytes(buffer.memory[:INLINE_BYTES]))
    channel.broadcast_host(buffer.flat[INLINE_BYTES:])
    buffer = _room_for(others)
    for chunk in others:
        packer.fill(buffer, chunk)
        channel.broadcast_host(buffer.flat[: chunk.num_bytes])
    for group, number in plan.big:
        channel.broadcast(as_bytes(dense(cargo.items[number])).to(group.kind))


def _receive(channel: _Channel, given: _Given) -> object:
    first = channel.meet(b"", given.refused)
    text_bytes, words_bytes, total = _LENGTHS.unpack_from(first)
    buffer = Buffer.of(max(total, INLINE_BYTES))
    buffer.memory[:INLINE_BYTES] = first
    channel.broadcast_host(buffer.flat[INLINE_BYTES:])
    offset = round_up(_LENGTHS.size + text_bytes + words_bytes, TENSOR_BYTES)
    head = bytes(buffer.memory[_LENGTHS.size : offset])
    table = Table.parse(head[text_bytes : text_bytes + words_bytes], channel.kinds)
    unpacker = Unpacker(table, given.device)
    plan = make_plan(table)
    unpacker.take(buffer.behind(offset), plan.chunks[0])
    buffer = _room_for(plan.chunks[1:])
    for chunk in plan.chunks[1:]:
        channel.broadcast_host(buffer.flat[: chunk.num_bytes])
        unpacker.take(buffer, chunk)
    for group, number in plan.big:
        flat = torch.empty(group.item_bytes, dtype=torch.uint8, device=group.kind)
        unpacker.take_big(channel.broadcast(flat), group, number)
    return decode(head[:text_bytes], unpacker.tensors(), unpacker.blobs())


def _room_for(chunks: Sequence[Chunk]) -> Buffer:
    return Buffer.of(max((chunk.num_bytes for chunk in chunks), default=0))


def _own(
    tensors: Sequence[torch.Tensor], cargo: Cargo, device: torch.device | None
) -> list[torch.Tensor]:
    """What the source itself gets: the same memory, or what becomes of it on another device."""
    own = {number: tensor.detach() for number, tensor in enumerate(tensors)}
    if device is not None:
        moved = {
            number: dense(item).to(device)
            for number, item in cargo.items.items()
            if item.device != device
        }
        own |= moved
        own |= {
            view.number: view.of(moved[view.base]) for view in cargo.views if view.base in moved
        }
    return [own[number] for number in range(len(tensors))]
