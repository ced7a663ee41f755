"""Which byte ranges of which file a rank must read: pure data, nothing is gathered.

plan_load([meta], {"w": StoredTensor(...)})  # -> reads in file order
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from unified_ckpt.errors import LoadError
from unified_ckpt.geometry import BoxMeta, Region, Shape, box_region, overlap, split_box
from unified_ckpt.geometry.tensors import dtype_of
from unified_ckpt.plans.save_plan import DEFAULT_CHUNK_BYTES


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint: `shape` is torch's shape (None where torch has no such tensor).

    `begin` and `end` are offsets in `file`, whose name is relative to the checkpoint's directory.
    """

    dtype: str
    shape: Shape | None
    file: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitTensor:
    """A tensor whose boxes are stored tensors of their own: (offset in it, stored box) pairs."""

    dtype: str
    shape: Shape
    boxes: tuple[tuple[Shape, StoredTensor], ...]


class Read(NamedTuple):
    """Read `region` of `file` into the box (offset, shape) of want number `want_index`."""

    file: str
    region: Region
    want_index: int
    offset: Shape
    shape: Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """All reads of one rank in file order; `missing` are keys that the checkpoint lacks."""

    reads: tuple[Read, ...]
    missing: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all reads."""
        return sum(read.region.num_bytes for read in self.reads)


def plan_load(
    wants: Sequence[BoxMeta],
    index: Mapping[str, StoredTensor | SplitTensor],
    *,
    cast: bool = False,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
) -> LoadPlan:
    """Plan the reads that fill every wanted box; one read has at most `chunk_bytes`.

    Raises:
        LoadError: a stored tensor has another shape than wanted, or another dtype without `cast`;
            or its stored boxes do not cover what is wanted.
    """
    reads: list[Read] = []
    missing: list[str] = []
    for want_index, want in enumerate(wants):
        stored = index.get(want.key)
        if stored is None:
            missing.append(want.key)
            continue
        _check_match(want, stored, cast)
        whole = _whole_read(want, want_index, stored, chunk_bytes)
        if whole is not None:
            reads.append(whole)
        else:
            reads += _reads_of(want, want_index, stored, chunk_bytes)
    reads.sort(key=lambda read: (read.file, read.region.start))
    return LoadPlan(reads=tuple(reads), missing=tuple(dict.fromkeys(missing)))


def _whole_read(
    want: BoxMeta, want_index: int, stored: StoredTensor | SplitTensor, chunk_bytes: int
) -> Read | None:
    """Return the one read of a tensor that is wanted whole: most of many small ones are."""
    if isinstance(stored, SplitTensor) or want.box.local_shape != stored.shape:
        return None
    num_bytes = stored.end - stored.begin
    if not 0 < num_bytes <= chunk_bytes:
        return None
    region = Region(stored.begin, num_bytes)
    return Read(stored.file, region, want_index, want.box.offset, stored.shape)


def _reads_of(
    want: BoxMeta, want_index: int, stored: StoredTensor | SplitTensor, chunk_bytes: int
) -> Iterator[Read]:
    size = dtype_of(stored.dtype).itemsize_bytes
    boxes = (
        stored.boxes
        if isinstance(stored, SplitTensor)
        else (((0,) * len(want.box.global_shape), stored),)
    )
    covered = 0
    wanted = (want.box.offset, want.box.local_shape)
    for begin, box in boxes:
        if box.shape is None:
            continue
        shared = overlap(wanted, (begin, box.shape)) if want.box.numel else None
        if shared is None:
            continue
        covered += math.prod(shared[1])
        for offset, shape in split_box(shared[1], size, chunk_bytes):
            absolute = tuple(s + o for s, o in zip(shared[0], offset, strict=True))
            inside = tuple(a - b for a, b in zip(absolute, begin, strict=True))
            region = box_region(box.shape, inside, shape, itemsize_bytes=size, start=box.begin)
            place = tuple(a - w for a, w in zip(absolute, want.box.offset, strict=True))
            yield Read(box.file, region, want_index, place, shape)
    if covered != want.box.numel:
        raise LoadError(
            f"{want.key!r}: the stored boxes hold {covered} of the {want.box.numel} elements of "
            f"{want.box}; the checkpoint is not complete"
        )


def _check_match(want: BoxMeta, stored: StoredTensor | SplitTensor, cast: bool) -> None:
    where = stored.file if isinstance(stored, StoredTensor) else stored.boxes[0][1].file
    if stored.shape != want.box.global_shape:
        raise LoadError(
            f"{want.key!r} in {where}: stored shape is {stored.shape}, wanted a box of "
            f"{want.box.global_shape}"
        )
    if stored.dtype != want.dtype and (not cast or "F4" in (stored.dtype, want.dtype)):
        remedy = "F4 cannot be cast" if cast else "allocate that dtype or pass cast=True"
        raise LoadError(
            f"{want.key!r} in {where}: stored dtype is {stored.dtype}, the destination has "
            f"{want.dtype}; {remedy}"
        )
