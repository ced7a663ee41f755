"""The boxes of all ranks as columns of numbers: what plans of thousands of ranks are made of.

Each rank describes its boxes in one small text of bytes; joined, they are a table with one row for
each box of each rank, in the order of ranks. A key stands in it once, however many ranks name it.
Tensors are numbered by part and key, which is the order of all that is planned from them.

    table = BoxTable.of([encode_boxes({"model": [meta]})])  # one text for each rank
    table.keys  # of tensor 0, 1, ...
"""

import hashlib
import json
import struct
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

import torch

from unified_ckpt.errors import CheckpointValueError
from unified_ckpt.geometry import BoxMeta, Shape
from unified_ckpt.geometry.tensors import dtype_of

NO_REPLICA = 2**63 - 1  # any number is lower, and so goes first
_ROWS_AT_ONCE = 8_192
_MOST_HEADS = 256  # that many ranks may each say something else before it is read again
_LENGTHS = struct.Struct("<IIIBB")  # of head, rows and dims; bytes of a dim; whether replicas count

Dims = tuple[Shape, Shape, Shape]


def encode_boxes(parts: Mapping[str, Sequence[BoxMeta]]) -> bytes:
    """Describe the boxes that one rank holds, by part, in its own order.

    Raises:
        CheckpointValueError: a box has a flat range.
    """
    metas = [(part, meta) for part, held in parts.items() for meta in held]
    for part, meta in metas:
        if meta.box.flattened_range is not None:
            raise CheckpointValueError(
                f"{part} {meta.key!r}: plan its unflattened boxes, not its flattened_range"
            )
    boxes = [meta.box for _, meta in metas]
    dtypes = sorted({meta.dtype for _, meta in metas})
    code_of = {name: code for code, name in enumerate(dtypes)}
    keys = {part: [meta.key for meta in held] for part, held in parts.items()}
    head = json.dumps([keys, dtypes], separators=(",", ":")).encode()
    dims = [*chain.from_iterable((*b.global_shape, *b.offset, *b.local_shape) for b in boxes)]
    replicas = [NO_REPLICA if b.replica_id is None else b.replica_id for b in boxes]
    counts = any(replica != NO_REPLICA for replica in replicas)
    wide = max(dims, default=0) >= 2**31
    columns = (
        bytes(code_of[meta.dtype] for _, meta in metas),
        bytes(len(box.global_shape) for box in boxes),
        struct.pack(f"<{len(dims)}{'q' if wide else 'i'}", *dims),
        struct.pack(f"<{len(boxes)}q", *replicas) if counts else b"",
    )
    lengths = _LENGTHS.pack(len(head), len(boxes), len(dims), 8 if wide else 4, counts)
    return zlib.compress(b"".join((lengths, head, *columns)), 1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BoxTable:
    """All boxes of all ranks, one a row; columns are whole numbers, `[rows]`.

    Attributes:
        num_ranks: of the save.
        parts: names, `model` first.
        keys: of each tensor; tensors are numbered by part and key.
        part: number of each tensor's part, `[tensors]`.
        dtypes: names; `dtype` counts in them.
        tensor: number of the tensor that a row's box belongs to.
        rank: who holds it.
        index: which one of the rank's boxes of the part it is.
        dtype: as that rank says it.
        replica: the box's `replica_id`, NO_REPLICA where it has none; None if no box has one.
        num_dims: of the tensor, as that rank says it.
        first_dim: where the row's numbers begin in `dims`.
        dims: global_shape, offset and local_shape of all rows, one after the other.
    """

    num_ranks: int
    parts: tuple[str, ...]
    keys: Sequence[str]
    part: torch.Tensor
    dtypes: tuple[str, ...]
    tensor: torch.Tensor
    rank: torch.Tensor
    index: torch.Tensor
    dtype: torch.Tensor
    replica: torch.Tensor | None
    num_dims: torch.Tensor
    first_dim: torch.Tensor
    dims: torch.Tensor

    @classmethod
    def of(cls, encoded: Iterable[bytes]) -> "BoxTable":
        """Join what `encode_boxes` returned on every rank, by rank."""
        names, columns, num_ranks = _Names(), _Columns(), 0
        for text in encoded:
            columns.add(num_ranks, zlib.decompress(text), names)
            num_ranks += 1
        return columns.table(num_ranks, names)

    @property
    def itemsize_bytes(self) -> list[int]:
        """Bytes of one element of each of `dtypes`."""
        return [dtype_of(name).itemsize_bytes for name in self.dtypes]

    def by_dims(
        self, rows: torch.Tensor | None = None
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield rows with equally many dims together, and their numbers.

        Args:
            rows: which ones, None for all.

        Yields:
            Positions in `rows`, int64 `[n]`, and global_shape, offset and local_shape, int64
            `[n, 3, dims]`; all of them in pieces that need little memory.
        """
        num_dims = self.num_dims if rows is None else self.num_dims[rows]
        for dims in num_dims.unique().tolist():
            places = (num_dims == dims).nonzero().squeeze(1)
            steps = torch.arange(3 * dims)
            for place in places.split(_ROWS_AT_ONCE):
                start = self.first_dim[place if rows is None else rows[place]]
                numbers = self.dims[start.unsqueeze(1) + steps]
                yield place, numbers.to(torch.int64).view(len(place), 3, dims)

    def tuples(self, rows: torch.Tensor) -> list[Dims]:
        """Return global_shape, offset and local_shape of some rows."""
        found: list[Dims] = [((), (), ())] * len(rows)
        for places, numbers in self.by_dims(rows):
            for place, (shape, offset, local) in zip(
                places.tolist(), numbers.tolist(), strict=True
            ):
                found[place] = (tuple(shape), tuple(offset), tuple(local))
        return found

    def keys_of(self, part: str) -> Sequence[str]:
        """Return the keys of a part in order, none if no rank has it."""
        if part not in self.parts:
            return ()
        first, end = self._tensors_of(part)
        return self.keys[first:end]

    def shapes_of(self, part: str) -> dict[str, Shape]:
        """Return the shape of each tensor of a part, as the lowest rank that holds it says it."""
        if part not in self.parts:
            return {}
        first, end = self._tensors_of(part)
        rows = self.first_rows()[first:end]
        return dict(zip(self.keys[first:end], (d[0] for d in self.tuples(rows)), strict=True))

    def first_rows(self) -> torch.Tensor:
        """Return the first row of each tensor, int64 `[tensors]`."""
        first = torch.full((len(self.keys),), len(self.tensor), dtype=torch.int64)
        rows = torch.arange(len(self.tensor))
        return first.scatter_reduce_(0, self.tensor.to(torch.int64), rows, "amin")

    def _tensors_of(self, part: str) -> tuple[int, int]:
        number = self.parts.index(part)
        first, end = torch.searchsorted(self.part, torch.tensor([number, number + 1])).tolist()
        return first, end


class _Names:
    """Numbers keys by part as they come; what many ranks say alike is read once."""

    def __init__(self) -> None:
        self.parts: dict[str, dict[str, int]] = {}
        self.dtypes: dict[str, int] = {}
        self.num_keys = 0
        self._known: dict[bytes, tuple[bytes, bytes, bytes]] = {}

    def read(self, head: bytes) -> tuple[bytes, bytes, bytes]:
        """Return tensor and index of each row of a rank (int32), and the code of each dtype's."""
        digest = hashlib.blake2b(head, digest_size=16).digest()
        if digest not in self._known:
            keys, dtypes = json.loads(head)
            codes = [self.dtypes.setdefault(name, len(self.dtypes)) for name in dtypes]
            rows = [*chain.from_iterable(self._number(part, keys[part]) for part in keys)]
            indexes = [*chain.from_iterable(range(len(keys[part])) for part in keys)]
            found = (
                struct.pack(f"<{len(rows)}i", *rows),
                struct.pack(f"<{len(rows)}i", *indexes),
                bytes(codes).ljust(256, b"\0"),
            )
            if len(self._known) < _MOST_HEADS:
                self._known[digest] = found
            return found
        return self._known[digest]

    def _number(self, part: str, keys: Sequence[str]) -> Iterator[int]:
        numbers = self.parts.setdefault(part, {})
        for key in keys:
            number = numbers.get(key)
            if number is None:
                number = numbers[key] = self.num_keys
                self.num_keys += 1
            yield number


class _Columns:
    """Collects the columns of one rank after the other, each in one piece of memory."""

    def __init__(self) -> None:
        self._bytes: dict[str, bytearray] = defaultdict(bytearray)
        self._num_rows = 0
        self._dim_bytes = 4
        self._has_replicas = False

    def add(self, rank: int, raw: bytes, names: _Names) -> None:
        """Take the description of the next rank, unpacked."""
        head_bytes, rows, num_dims, dim_bytes, has_replicas = _LENGTHS.unpack_from(raw)
        begin = _LENGTHS.size + head_bytes
        tensor, index, codes = names.read(raw[_LENGTHS.size : begin])
        dtype, dims_of, dims, replica = _cut(raw, begin, [rows, rows, dim_bytes * num_dims])
        if dim_bytes != self._dim_bytes:
            dims = self._widened(dims)
        if has_replicas and not self._has_replicas:
            self._has_replicas = True
            self._bytes["replica"] += struct.pack("<q", NO_REPLICA) * self._num_rows
        if self._has_replicas:
            self._bytes["replica"] += replica or struct.pack("<q", NO_REPLICA) * rows
        self._num_rows += rows
        for name, column in (
            ("tensor", tensor),
            ("index", index),
            ("rank", struct.pack("<i", rank) * rows),
            ("dtype", dtype.translate(codes)),
            ("num_dims", dims_of),
            ("dims", dims),
        ):
            self._bytes[name] += column

    def _widened(self, dims: bytes) -> bytes:
        """Make all dims 8 bytes wide, once one of them must be."""
        if self._dim_bytes == 8:
            return _to_wide(dims)
        self._dim_bytes = 8
        self._bytes["dims"] = bytearray(_to_wide(bytes(self._bytes["dims"])))
        return dims

    def table(self, num_ranks: int, names: _Names) -> BoxTable:
        """Join all ranks' columns, and number tensors by part and key."""
        parts = sorted(names.parts, key=lambda part: (part != "model", part))
        keys: list[str] = []
        place = torch.empty(names.num_keys, dtype=torch.int32)
        part_of = torch.empty(names.num_keys, dtype=torch.int32)
        for number, part in enumerate(parts):
            numbers = names.parts.pop(part)
            first = len(keys)
            keys += sorted(numbers)
            old = torch.tensor([numbers[key] for key in keys[first:]], dtype=torch.int64)
            place[old] = torch.arange(first, len(keys), dtype=torch.int32)
            part_of[first : len(keys)] = number
        dims_of = self._column("num_dims", torch.uint8)
        ends = 3 * dims_of.cumsum(0, dtype=torch.int64)
        if not len(ends) or int(ends[-1]) < 2**31:
            ends = ends.to(torch.int32)
        return BoxTable(
            num_ranks=num_ranks,
            parts=tuple(parts),
            keys=keys,
            part=part_of,
            dtypes=tuple(names.dtypes),
            tensor=place[self._column("tensor", torch.int32)],
            rank=self._column("rank", torch.int32),
            index=self._column("index", torch.int32),
            dtype=self._column("dtype", torch.uint8),
            replica=self._column("replica", torch.int64) if self._has_replicas else None,
            num_dims=dims_of,
            first_dim=ends.sub_(dims_of, alpha=3),
            dims=self._column("dims", torch.int64 if self._dim_bytes == 8 else torch.int32),
        )

    def _column(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        memory = self._bytes.pop(name, None)
        return torch.frombuffer(memory, dtype=dtype) if memory else torch.empty(0, dtype=dtype)


def _cut(raw: bytes, begin: int, lengths: Sequence[int]) -> list[bytes]:
    """Cut bytes into pieces of these lengths, and the rest."""
    ends = [*accumulate(lengths, initial=begin), len(raw)]
    return [raw[a:b] for a, b in pairwise(ends)]


def _to_wide(dims: bytes) -> bytes:
    count = len(dims) // 4
    return struct.pack(f"<{count}q", *struct.unpack(f"<{count}i", dims))
