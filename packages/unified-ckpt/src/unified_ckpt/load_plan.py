"""Which byte ranges of which file a rank must read: pure data, nothing is gathered.

plan_load([meta], {"w": StoredTensor(...)})  # -> reads in file order
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unified_ckpt.boxes import Region, Shape, box_region, split_box
from unified_ckpt.dtypes import dtype_of
from unified_ckpt.errors import LoadError
from unified_ckpt.save_plan import DEFAULT_CHUNK_BYTES
from unified_ckpt.shard import BoxMeta


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor of a checkpoint: `shape` is torch's shape (None where torch has no such tensor).

    `begin` and `end` are offsets in `file`, whose name is relative to the checkpoint's directory.
    """

    dtype: str
    shape: Shape | None
    file: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Read:
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
    index: Mapping[str, StoredTensor],
    *,
    cast: bool = False,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
) -> LoadPlan:
    """Plan the reads that fill every wanted box; one read has at most `chunk_bytes`.

    Raises:
        LoadError: a stored tensor has another shape than wanted, or another dtype without `cast`.
    """
    reads: list[Read] = []
    missing: list[str] = []
    for want_index, want in enumerate(wants):
        stored = index.get(want.key)
        if stored is None:
            missing.append(want.key)
            continue
        _check_match(want, stored, cast)
        size = dtype_of(stored.dtype).itemsize_bytes
        for offset, shape in split_box(want.shape, size, chunk_bytes):
            absolute = tuple(b + o for b, o in zip(want.offset, offset, strict=True))
            region = box_region(
                want.global_shape, absolute, shape, itemsize_bytes=size, start=stored.begin
            )
            reads.append(Read(stored.file, region, want_index, offset, shape))
    reads.sort(key=lambda read: (read.file, read.region.start))
    return LoadPlan(reads=tuple(reads), missing=tuple(dict.fromkeys(missing)))


def _check_match(want: BoxMeta, stored: StoredTensor, cast: bool) -> None:
    if stored.shape != want.global_shape:
        raise LoadError(
            f"{want.key!r} in {stored.file}: stored shape is {stored.shape}, wanted a box of "
            f"{want.global_shape}"
        )
    if stored.dtype != want.dtype and (not cast or "F4" in (stored.dtype, want.dtype)):
        remedy = "F4 cannot be cast" if cast else "allocate that dtype or pass cast=True"
        raise LoadError(
            f"{want.key!r} in {stored.file}: stored dtype is {stored.dtype}, the destination has "
            f"{want.dtype}; {remedy}"
        )
