"""How the tensors and bytes of a value travel: small ones packed into chunks, big ones alone.

Small tensors of one dtype and shape form a group, which one torch call packs and one unpacks into
tensors with memory of their own. A chunk has a sixteenth of the payload, but 1 to 4 MiB; a tensor
of 1 MiB is big. A rank holds one chunk at a time, so packing costs no more memory than that. Bytes
objects are cut where a chunk ends.

Invariant: the plan follows from the table alone, so every rank computes the same.

    cargo = find_cargo([w, b])
    chunk = make_plan(describe(cargo, 2, [], kind_of)).chunks[0]
    buffer = Buffer.of(chunk.num_bytes)
    Packer(cargo.items, []).fill(buffer, chunk)           # on the source
    unpacker.take(buffer, chunk)                          # on a receiver
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from typing import NamedTuple, cast, final

import torch

from comm_collectives.base import DTYPES, dense, dtype_code, from_bytes, num_bytes
from comm_collectives.nested.sharing import Cargo, View
from comm_collectives.units import TENSOR_BYTES, round_up

# Each message costs as much as some hundred KiB, most where ranks share a core.
_MIN_CHUNK_BYTES, _MAX_CHUNK_BYTES, _CHUNKS = 1 << 20, 1 << 22, 16
# What torch has long been able to stack; other dtypes are packed as integers of their size.
_ORDINARY = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_ORDINARY |= {torch.float16, torch.bfloat16, torch.float32, torch.float64}
# torch's own annotation says that it returns None.
_unbind_copy = cast("Callable[[torch.Tensor], Sequence[torch.Tensor]]", torch.unbind_copy)
_INT_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Group(NamedTuple):
    """Tensors of one dtype and shape, by number, and the kind of device that they travel on."""

    kind: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    numbers: Sequence[int]

    @property
    def item_bytes(self) -> int:
        """Size of one tensor."""
        return num_bytes(self.dtype, self.shape)


class Table(NamedTuple):
    """Everything that a receiver has to know of the tensors and bytes to come."""

    num_tensors: int
    groups: list[Group]
    views: list[View]
    blob_bytes: list[int]

    def to_json(self) -> bytes:
        """Return the table as text."""
        return json.dumps(
            [
                self.num_tensors,
                [[g.kind, dtype_code(g.dtype), g.shape, g.numbers] for g in self.groups],
                [[*view[:2], dtype_code(view.dtype), *view[3:]] for view in self.views],
                self.blob_bytes,
            ]
        ).encode()

    @staticmethod
    def from_json(text: bytes) -> "Table":
        """Read what `to_json` wrote."""
        num_tensors, groups, views, blob_bytes = json.loads(text)
        return Table(
            num_tensors,
            [Group(kind, DTYPES[code], tuple(s), numbers) for kind, code, s, numbers in groups],
            [View(number, base, DTYPES[code], *where) for number, base, code, *where in views],
            blob_bytes,
        )


def describe(
    cargo: Cargo, num_tensors: int, blobs: Sequence[bytes], kind_of: Callable[[torch.device], str]
) -> Table:
    """Describe what travels; `kind_of` says on which kind of device a tensor does."""
    numbers_of: dict[tuple[torch.device, torch.dtype, torch.Size], list[int]] = {}
    for number, item in cargo.items.items():
        numbers_of.setdefault((item.device, item.dtype, item.shape), []).append(number)
    groups = [
        Group(kind_of(device), dtype, tuple(shape), numbers)
        for (device, dtype, shape), numbers in numbers_of.items()
    ]
    return Table(num_tensors, groups, cargo.views, [len(blob) for blob in blobs])


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory on the host, for Python's bytes and for torch at once."""

    memory: memoryview
    flat: torch.Tensor  # uint8

    @staticmethod
    def of(num_bytes: int) -> "Buffer":
        """Allocate zeroed memory."""
        # frombuffer refuses an empty buffer.
        whole = bytearray(max(num_bytes, 1))
        flat = torch.frombuffer(whole, dtype=torch.uint8)
        return Buffer(memoryview(whole)[:num_bytes], flat[:num_bytes])

    def behind(self, start: int) -> "Buffer":
        """Return the part from byte `start` on."""
        return Buffer(self.memory[start:], self.flat[start:])


class Rows(NamedTuple):
    """Items of a group by number, `start` bytes behind the beginning of a chunk."""

    group: Group
    numbers: Sequence[int]
    start: int

    def in_buffer(self, buffer: "Buffer") -> torch.Tensor:
        """The items stacked, in their place in a buffer, of a dtype that torch can stack."""
        length = len(self.numbers) * self.group.item_bytes
        flat = buffer.flat[self.start : self.start + length]
        return from_bytes(flat, _carrier(self.group.dtype), (len(self.numbers), *self.group.shape))


class Cut(NamedTuple):
    """Bytes `first` and following of a bytes object."""

    blob: int
    first: int
    num_bytes: int


@dataclass(slots=True)
class Chunk:
    """What travels in one message: tensors, and behind them bytes without gaps up to the end."""

    num_bytes: int = 0
    rows: list[Rows] = field(default_factory=list)
    cuts: list[Cut] = field(default_factory=list)

    def cuts_in(self, buffer: Buffer) -> Iterator[tuple[Cut, memoryview]]:
        """Yield each cut and its place in a buffer."""
        start = self.num_bytes - sum(cut.num_bytes for cut in self.cuts)
        for cut in self.cuts:
            yield cut, buffer.memory[start : start + cut.num_bytes]
            start += cut.num_bytes


class Plan(NamedTuple):
    """Chunks in the order in which they travel (the first may be empty), then the big tensors."""

    chunks: list[Chunk]
    big: list[tuple[Group, int]]


def make_plan(table: Table) -> Plan:
    """Lay out the small things in chunks."""
    payload = sum(g.item_bytes * len(g.numbers) for g in table.groups) + sum(table.blob_bytes)
    limit = min(max(payload // _CHUNKS, _MIN_CHUNK_BYTES), _MAX_CHUNK_BYTES)
    limit = round_up(limit, TENSOR_BYTES)
    chunks = [Chunk()]
    big: list[tuple[Group, int]] = []
    for group in table.groups:
        size = group.item_bytes
        if size >= _MIN_CHUNK_BYTES:
            big += [(group, number) for number in group.numbers]
            continue
        for chunk, first, count in _fit(chunks, limit, size, len(group.numbers)):
            chunk.rows.append(Rows(group, group.numbers[first : first + count], chunk.num_bytes))
            chunk.num_bytes += round_up(count * size, TENSOR_BYTES)
    for blob, size in enumerate(table.blob_bytes):
        for chunk, first, count in _fit(chunks, limit, 1, size):
            chunk.cuts.append(Cut(blob, first, count))
            chunk.num_bytes += count
    return Plan(chunks, big)


def _fit(
    chunks: list[Chunk], limit: int, item_bytes: int, num_items: int
) -> Iterator[tuple[Chunk, int, int]]:
    """Yield a chunk, the first item that it takes, and how many; opens chunks as needed.

    The caller adds them before it asks for more.
    """
    first = 0
    while first < num_items:
        room = limit - chunks[-1].num_bytes
        count = min(num_items - first, room // item_bytes if item_bytes else num_items)
        if count > 0:
            yield chunks[-1], first, count
            first += count
        else:
            chunks.append(Chunk())


@final
class Packer:
    """Writes tensors and bytes of the source into chunks."""

    def __init__(self, items: Mapping[int, torch.Tensor], blobs: Sequence[bytes]) -> None:
        self._items = items
        self._blobs = blobs

    def fill(self, buffer: Buffer, chunk: Chunk) -> None:
        """Write a chunk to the beginning of a buffer."""
        for rows in chunk.rows:
            if rows.group.item_bytes:
                self._fill_rows(rows.in_buffer(buffer), rows)
        for cut, place in chunk.cuts_in(buffer):
            data = memoryview(self._blobs[cut.blob])
            place[:] = data[cut.first : cut.first + cut.num_bytes]

    def _fill_rows(self, target: torch.Tensor, rows: Rows) -> None:
        items = [self._items[number] for number in rows.numbers]
        if target.dtype is not rows.group.dtype:
            items = [dense(item).view(target.dtype) for item in items]
        with torch.no_grad():  # `out=` refuses parameters otherwise
            if items[0].device.type == "cpu":
                torch.stack(items, out=target)
            else:
                target.copy_(torch.stack(items))


@final
class Unpacker:
    """Makes the receiver's tensors and bytes from what arrives."""

    def __init__(self, table: Table, device: torch.device | None) -> None:
        self._table = table
        self._device = device
        self._items: dict[int, torch.Tensor] = {}
        self._blobs = [b""] * len(table.blob_bytes)
        self._parts: dict[int, BytesIO] = {}  # of those that come in several chunks

    def take(self, buffer: Buffer, chunk: Chunk) -> None:
        """Copy a chunk's contents out of the beginning of a buffer."""
        for rows in chunk.rows:
            place, dtype = rows.in_buffer(buffer), rows.group.dtype
            # Copies, since views would keep the whole chunk alive.
            items = _unbind_copy(place.to(self._device or rows.group.kind))
            if place.dtype is not dtype:
                items = [item.view(dtype) for item in items]
            self._items.update(zip(rows.numbers, items, strict=True))
        for cut, data in chunk.cuts_in(buffer):
            if cut.num_bytes == self._table.blob_bytes[cut.blob]:
                self._blobs[cut.blob] = bytes(data)
            else:
                self._parts.setdefault(cut.blob, BytesIO()).write(data)

    def take_big(self, flat: torch.Tensor, group: Group, number: int) -> None:
        """Keep a tensor that has memory of its own, as [nbytes] uint8."""
        item = from_bytes(flat, group.dtype, group.shape)
        self._items[number] = item if self._device is None else item.to(self._device)

    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors, when everything has arrived."""
        for view in self._table.views:
            self._items[view.number] = view.of(self._items[view.base])
        return [self._items[number] for number in range(self._table.num_tensors)]

    def blobs(self) -> list[bytes]:
        """Return the bytes objects, when everything has arrived."""
        for number, parts in self._parts.items():
            self._blobs[number] = parts.getvalue()
        return self._blobs


def _carrier(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in _ORDINARY else _INT_OF_SIZE.get(dtype.itemsize, dtype)
