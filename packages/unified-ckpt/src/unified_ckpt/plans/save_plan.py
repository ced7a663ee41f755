"""Who writes which bytes of which file: pure data, computed identically on every rank.

Every box is written once, by one of the ranks that hold it, so that bytes are balanced over ranks.
A stored tensor that one rank can write whole goes into a file of that rank alone; a stored tensor
that is split over ranks goes into a file that several ranks write at their own byte ranges.

    plan = plan_save([{"model": [meta]}])  # one list of boxes per rank and part
    plan.files[0].name == "model.safetensors"
"""

import itertools
import json
import math
import operator
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from unified_ckpt.errors import CheckpointValueError
from unified_ckpt.files.format import HeaderEntry, encode_header
from unified_ckpt.geometry import BoxMeta, Region, Shape, box_region, check_tiling, split_box
from unified_ckpt.geometry.tensors import dtype_of

DEFAULT_MAX_SHARD_BYTES = 5_000_000_000
DEFAULT_CHUNK_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes that one rank writes and checksums as one: a box of one of its shards.

    `shard_index` counts in the rank's list of the file's part; `offset` is relative to that shard.
    """

    rank: int
    shard_index: int
    offset: Shape
    shape: Shape
    region: Region


@dataclass(frozen=True, kw_only=True, eq=False)
class FilePlan:
    """One safetensors file: `owner` writes the header, `pieces` tile the bytes after it.

    `header`, `entries` and `pieces` are made when they are asked for, as a rank needs those of the
    files that it writes only.
    """

    name: str
    part: str
    owner: int
    writers: frozenset[int]
    tensor_bytes: int
    tensors: "tuple[_Written, ...]" = field(repr=False)
    chunk_bytes: int

    @cached_property
    def _layout(self) -> tuple[bytes, tuple[HeaderEntry, ...]]:
        stored = [written.tensor for written in self.tensors]
        return encode_header([HeaderEntry(key=t.key, dtype=t.dtype, shape=t.shape) for t in stored])

    @property
    def header(self) -> bytes:
        """The first bytes of the file, before the tensors."""
        return self._layout[0]

    @property
    def entries(self) -> tuple[HeaderEntry, ...]:
        """The tensors with their places in the file, in that order."""
        return self._layout[1]

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return len(self.header) + self.tensor_bytes

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """What is written after the header, in the order of the tensors."""
        return tuple(
            piece
            for written, entry in zip(self.tensors, self.entries, strict=True)
            for piece in _pieces(written, entry.begin, self.chunk_bytes)
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class SavePlan:
    """All files of a save; `rank_bytes` is what each rank writes."""

    files: tuple[FilePlan, ...]
    rank_bytes: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all files of the plan."""
        return sum(f.num_bytes for f in self.files) + sum(map(len, self.indexes.values()))

    @property
    def index_names(self) -> list[str]:
        """Names of the `.index.json` of parts in several files."""
        counts = Counter(file.part for file in self.files)
        return [f"{part}.safetensors.index.json" for part, count in counts.items() if count > 1]

    @cached_property
    def indexes(self) -> Mapping[str, bytes]:
        """The bytes of each `.index.json` by name."""
        return {
            name: _index([f for f in self.files if name == f"{f.part}.safetensors.index.json"])
            for name in self.index_names
        }


@dataclass(frozen=True, slots=True)
class _Held:
    """A distinct non-empty box and where it is held: (rank, shard_index) pairs by rank."""

    offset: Shape
    shape: Shape
    holders: tuple[tuple[int, int], ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Tensor:
    key: str
    dtype: str
    shape: Shape
    boxes: tuple[_Held, ...]
    lowest_rank: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Written:
    """A stored tensor whose every box has its writer: (rank, shard_index), box by box."""

    tensor: _Tensor
    writers: tuple[tuple[int, int], ...]

    @property
    def group(self) -> tuple[bool, int]:
        """Tensors of one group share files: split or whole, then the first writer."""
        ranks = {rank for rank, _ in self.writers}
        first = self.writers[0][0] if self.writers else self.tensor.lowest_rank
        return (len(ranks) > 1, first)


class _Holders:
    """Who holds a box: shard index by rank, of the lowest replica id only."""

    def __init__(self) -> None:
        self._replica_id: int | None = None
        self._index_of: dict[int, int] = {}

    def add(self, rank: int, index: int, replica_id: int | None) -> None:
        if replica_id != self._replica_id:
            lower = self._replica_id is None or (
                replica_id is not None and replica_id < self._replica_id
            )
            if self._index_of and not lower:
                return
            self._replica_id, self._index_of = replica_id, {}
        self._index_of.setdefault(rank, index)

    def writers(self) -> tuple[tuple[int, int], ...]:
        return tuple(self._index_of.items())


def plan_save(
    held: Sequence[Mapping[str, Sequence[BoxMeta]]],
    *,
    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    kept_sharded: Mapping[str, Collection[str]] | None = None,
    excluded: Mapping[str, Collection[str]] | None = None,
) -> SavePlan:
    """Plan a save from what each rank holds (`held[rank][part]`, boxes in the rank's own order).

    A file holds at most `max_shard_bytes` of tensors unless one tensor alone is larger. A piece,
    the unit of checksums, has at most `chunk_bytes`.

    Args:
        kept_sharded: by part, tensors whose boxes become stored tensors of their own (`split_key`).
        excluded: by part, tensors that are checked but not written.

    Raises:
        CheckpointValueError: ranks disagree about a tensor, boxes overlap, or a tensor has a hole.
    """
    if max_shard_bytes < 1 or chunk_bytes < 1:
        raise CheckpointValueError(
            f"max_shard_bytes={max_shard_bytes}, chunk_bytes={chunk_bytes}: both must be at least 1"
        )
    parts = sorted({part for boxes in held for part in boxes}, key=lambda p: (p != "model", p))
    tensors = {part: _tensors_of(part, held) for part in parts}
    for part, keys in (excluded or {}).items():
        tensors[part] = [t for t in tensors.get(part, []) if t.key not in keys]
    for part, keys in (kept_sharded or {}).items():
        split = [_split_into_boxes(t) if t.key in keys else [t] for t in tensors.get(part, [])]
        tensors[part] = sorted(itertools.chain(*split), key=lambda t: t.key)
    rank_bytes, writers = _assign(tensors, len(held))
    files: list[FilePlan] = []
    for part in parts:
        written = [_Written(t, writers[part, t.key]) for t in tensors[part]]
        files += _plan_files(part, written, max_shard_bytes, chunk_bytes)
    return SavePlan(files=tuple(files), rank_bytes=rank_bytes)


def _tensors_of(part: str, held: Sequence[Mapping[str, Sequence[BoxMeta]]]) -> list[_Tensor]:
    """Merge what the ranks hold into stored tensors, by key; equal boxes become one."""
    first: dict[str, tuple[int, BoxMeta]] = {}
    holders: dict[str, dict[tuple[Shape, Shape], _Holders]] = defaultdict(dict)
    for rank, parts in enumerate(held):
        for index, meta in enumerate(parts.get(part, ())):
            known_rank, known = first.setdefault(meta.key, (rank, meta))
            box = meta.box
            if (known.dtype, known.box.global_shape) != (meta.dtype, box.global_shape):
                raise CheckpointValueError(
                    f"{part} {meta.key!r}: rank {known_rank} says {known.dtype} "
                    f"{known.box.global_shape}, rank {rank} says {meta.dtype} {box.global_shape}"
                )
            if box.flattened_range is not None:
                raise CheckpointValueError(
                    f"{part} {meta.key!r}: plan its unflattened boxes, not its flattened_range"
                )
            if box.numel:
                boxes_of_key, place = holders[meta.key], (box.offset, box.local_shape)
                if place not in boxes_of_key:
                    boxes_of_key[place] = _Holders()
                boxes_of_key[place].add(rank, index, box.replica_id)
    tensors = []
    for key in sorted(first):
        lowest_rank, meta = first[key]
        global_shape = meta.box.global_shape
        boxes = sorted(holders[key])
        whole = len(boxes) == 1 and boxes[0][1] == global_shape  # most are
        problem = None if whole else check_tiling(global_shape, boxes)
        if problem is not None:
            raise CheckpointValueError(f"{part} {key!r} {global_shape}: {problem}")
        size = dtype_of(meta.dtype).itemsize_bytes
        tensors.append(
            _Tensor(
                key,
                meta.dtype,
                global_shape,
                tuple(
                    _Held(*box, holders[key][box].writers(), math.prod(box[1]) * size)
                    for box in boxes
                ),
                lowest_rank,
                math.prod(global_shape) * size,
            )
        )
    return tensors


def split_key(key: str, offset: Shape, shape: Shape, global_shape: Shape) -> str:
    """Return the stored key of a box that is a stored tensor of its own: `KEY@0:4,8:16@4,16`."""
    box = ",".join(f"{o}:{o + n}" for o, n in zip(offset, shape, strict=True))
    return f"{key}@{box}@{','.join(map(str, global_shape))}"


def _split_into_boxes(tensor: _Tensor) -> list[_Tensor]:
    """Make every box of a tensor that is in several boxes a stored tensor of its own."""
    if len(tensor.boxes) < 2:
        return [tensor]
    return [
        _Tensor(
            split_key(tensor.key, box.offset, box.shape, tensor.shape),
            tensor.dtype,
            box.shape,
            (replace(box, offset=(0,) * len(box.shape)),),
            tensor.lowest_rank,
            box.num_bytes,
        )
        for box in tensor.boxes
    ]


def _assign(
    tensors: Mapping[str, Sequence[_Tensor]], world_size: int
) -> tuple[tuple[int, ...], dict[tuple[str, str], tuple[tuple[int, int], ...]]]:
    """Choose each box's writer: lone holders first, then the largest box to the least loaded."""
    load = [0] * world_size
    writers: dict[tuple[str, str], list[tuple[int, int]]] = {}
    open_boxes: list[tuple[int, str, str, int, _Held]] = []
    for part, part_tensors in tensors.items():
        for tensor in part_tensors:
            writers[part, tensor.key] = [box.holders[0] for box in tensor.boxes]
            for number, box in enumerate(tensor.boxes):
                if len(box.holders) == 1:
                    load[box.holders[0][0]] += box.num_bytes
                else:
                    open_boxes.append((-box.num_bytes, part, tensor.key, number, box))
    open_boxes.sort(key=lambda item: item[:4])
    for _, part, key, number, box in open_boxes:
        chosen = min(box.holders, key=lambda holder: (load[holder[0]], holder[0]))
        load[chosen[0]] += box.num_bytes
        writers[part, key][number] = chosen
    return tuple(load), {name: tuple(chosen) for name, chosen in writers.items()}


def _plan_files(
    part: str, written: Sequence[_Written], max_shard_bytes: int, chunk_bytes: int
) -> list[FilePlan]:
    groups: dict[tuple[bool, int], list[_Written]] = defaultdict(list)
    for tensor in written:
        groups[tensor.group].append(tensor)
    packs = [
        pack for group in sorted(groups) for pack in _pack(groups[group], max_shard_bytes)
    ] or [[]]
    names = [f"{part}-{i + 1:05d}-of-{len(packs):05d}.safetensors" for i in range(len(packs))]
    if len(packs) == 1:
        names = [f"{part}.safetensors"]
    return [
        _plan_file(name, part, pack, chunk_bytes) for name, pack in zip(names, packs, strict=True)
    ]


def _pack(written: Sequence[_Written], max_shard_bytes: int) -> list[list[_Written]]:
    packs: list[list[_Written]] = []
    used = 0
    for tensor in written:
        size = tensor.tensor.num_bytes
        if not packs or used + size > max_shard_bytes:
            packs.append([])
            used = 0
        packs[-1].append(tensor)
        used += size
    # Wide dtypes first keeps every tensor aligned to its own item size, as readers that map like.
    for pack in packs:
        pack.sort(key=lambda w: (-dtype_of(w.tensor.dtype).itemsize_bytes, w.tensor.key))
    return packs


def _plan_file(name: str, part: str, pack: Sequence[_Written], chunk_bytes: int) -> FilePlan:
    writers = {rank for written in pack for rank, _ in written.writers}
    return FilePlan(
        name=name,
        part=part,
        owner=min(writers, default=pack[0].tensor.lowest_rank if pack else 0),
        writers=frozenset(writers),
        tensor_bytes=sum(written.tensor.num_bytes for written in pack),
        tensors=tuple(pack),
        chunk_bytes=chunk_bytes,
    )


def _pieces(written: _Written, start: int, chunk_bytes: int) -> list[Piece]:
    tensor = written.tensor
    if len(tensor.boxes) == 1 and tensor.num_bytes <= chunk_bytes:  # most, and much faster
        ((rank, shard_index),) = written.writers
        region = Region(start, tensor.num_bytes)
        return [Piece(rank, shard_index, (0,) * len(tensor.shape), tensor.shape, region)]
    size = dtype_of(tensor.dtype).itemsize_bytes
    pieces = []
    for box, (rank, shard_index) in zip(tensor.boxes, written.writers, strict=True):
        for offset, shape in split_box(box.shape, size, chunk_bytes):
            absolute = tuple(b + o for b, o in zip(box.offset, offset, strict=True))
            region = box_region(tensor.shape, absolute, shape, itemsize_bytes=size, start=start)
            pieces.append(Piece(rank, shard_index, offset, shape, region))
    return pieces


def _index(files: Sequence[FilePlan]) -> bytes:
    """Write the index as transformers does: every key's file, and the bytes of all tensors."""
    weight_map = {written.tensor.key: file.name for file in files for written in file.tensors}
    total = sum(file.tensor_bytes for file in files)
    lines = [f"    {json.dumps(key, ensure_ascii=False)}: " for key in sorted(weight_map)]
    names = [json.dumps(weight_map[key]) for key in sorted(weight_map)]
    rows = ",\n".join(map(operator.add, lines, names))
    head = f'{{\n  "metadata": {{\n    "total_size": {total}\n  }},\n  "weight_map": {{\n'
    return f"{head}{rows}\n  }}\n}}\n".encode()
