"""Who writes which bytes of which file: pure data, computed identically on every rank.

Every box is written once, by one of the ranks that hold it, so that bytes are balanced over ranks.
A stored tensor that one rank can write whole goes into a file of that rank alone; a stored tensor
that is split over ranks goes into a file that several ranks write at their own byte ranges.

    plan = plan_save([{"model": [meta]}])  # one list of boxes per rank and part
    plan.files[0].name == "model.safetensors"
"""

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unified_ckpt.boxes import Region, Shape, box_region, check_tiling, split_box
from unified_ckpt.dtypes import dtype_of
from unified_ckpt.header import HeaderEntry, encode_header
from unified_ckpt.shard import BoxMeta

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


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePlan:
    """One safetensors file: `owner` writes the header, `pieces` tile the bytes after it."""

    name: str
    part: str
    header: bytes
    num_bytes: int
    owner: int
    entries: tuple[HeaderEntry, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePlan:
    """All files of a save.

    `indexes` holds the bytes of each `.index.json` by name, `rank_bytes` what each rank writes.
    """

    files: tuple[FilePlan, ...]
    indexes: Mapping[str, bytes]
    rank_bytes: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all files of the plan."""
        return sum(f.num_bytes for f in self.files) + sum(map(len, self.indexes.values()))


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


def plan_save(
    held: Sequence[Mapping[str, Sequence[BoxMeta]]],
    *,
    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
) -> SavePlan:
    """Plan a save from what each rank holds (`held[rank][part]`, boxes in the rank's own order).

    A file holds at most `max_shard_bytes` of tensors unless one tensor alone is larger. A piece,
    the unit of checksums, has at most `chunk_bytes`.

    Raises:
        ValueError: ranks disagree about a tensor, boxes overlap, or a tensor has a hole.
    """
    if max_shard_bytes < 1 or chunk_bytes < 1:
        raise ValueError(
            f"max_shard_bytes={max_shard_bytes}, chunk_bytes={chunk_bytes}: both must be at least 1"
        )
    parts = sorted({part for boxes in held for part in boxes}, key=lambda p: (p != "model", p))
    tensors = {part: _tensors_of(part, held) for part in parts}
    rank_bytes, writers = _assign(tensors, len(held))
    files: list[FilePlan] = []
    indexes: dict[str, bytes] = {}
    for part in parts:
        written = [_Written(t, writers[part, t.key]) for t in tensors[part]]
        part_files = _plan_files(part, written, max_shard_bytes, chunk_bytes)
        files += part_files
        if len(part_files) > 1:
            indexes[f"{part}.safetensors.index.json"] = _index(part_files)
    return SavePlan(files=tuple(files), indexes=indexes, rank_bytes=rank_bytes)


def _tensors_of(part: str, held: Sequence[Mapping[str, Sequence[BoxMeta]]]) -> list[_Tensor]:
    """Merge what the ranks hold into stored tensors, by key; equal boxes become one."""
    first: dict[str, tuple[int, BoxMeta]] = {}
    holders: dict[str, dict[tuple[Shape, Shape], dict[int, int]]] = defaultdict(dict)
    for rank, parts in enumerate(held):
        for index, meta in enumerate(parts.get(part, ())):
            known_rank, known = first.setdefault(meta.key, (rank, meta))
            if (known.dtype, known.global_shape) != (meta.dtype, meta.global_shape):
                raise ValueError(
                    f"{part} {meta.key!r}: rank {known_rank} says {known.dtype} "
                    f"{known.global_shape}, rank {rank} says {meta.dtype} {meta.global_shape}"
                )
            if meta.numel:
                box = holders[meta.key].setdefault((meta.offset, meta.shape), {})
                box.setdefault(rank, index)
    tensors = []
    for key in sorted(first):
        lowest_rank, meta = first[key]
        boxes = sorted(holders[key])
        problem = check_tiling(meta.global_shape, boxes)
        if problem is not None:
            raise ValueError(f"{part} {key!r} {meta.global_shape}: {problem}")
        size = dtype_of(meta.dtype).itemsize_bytes
        tensors.append(
            _Tensor(
                key,
                meta.dtype,
                meta.global_shape,
                tuple(
                    _Held(*box, tuple(holders[key][box].items()), math.prod(box[1]) * size)
                    for box in boxes
                ),
                lowest_rank,
            )
        )
    return tensors


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


def _num_bytes(written: _Written) -> int:
    return sum(box.num_bytes for box in written.tensor.boxes)


def _pack(written: Sequence[_Written], max_shard_bytes: int) -> list[list[_Written]]:
    packs: list[list[_Written]] = []
    used = 0
    for tensor in written:
        size = _num_bytes(tensor)
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
    header, entries = encode_header(
        [HeaderEntry(key=w.tensor.key, dtype=w.tensor.dtype, shape=w.tensor.shape) for w in pack]
    )
    pieces = [
        piece
        for written, entry in zip(pack, entries, strict=True)
        for piece in _pieces(written, entry.begin, chunk_bytes)
    ]
    return FilePlan(
        name=name,
        part=part,
        header=header,
        num_bytes=entries[-1].end if entries else len(header),
        owner=min((p.rank for p in pieces), default=pack[0].tensor.lowest_rank if pack else 0),
        entries=entries,
        pieces=tuple(pieces),
    )


def _pieces(written: _Written, start: int, chunk_bytes: int) -> list[Piece]:
    tensor = written.tensor
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
    weight_map = {entry.key: file.name for file in files for entry in file.entries}
    total = sum(entry.end - entry.begin for file in files for entry in file.entries)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()


def describe_plan(plan: SavePlan) -> str:
    """Return one line per file: its name, size, writers and number of tensors."""
    return "\n".join(
        f"{f.name}  {f.num_bytes} B  {len(f.entries)} tensors  "
        f"ranks {sorted({p.rank for p in f.pieces} | {f.owner})}"
        for f in plan.files
    )
