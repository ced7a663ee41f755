"""A file to write, as ranges to copy, and its units: what is copied, checked and redone as one.

    for unit in plan.targets[0].units(32 << 20):
        unit.begin, unit.end, unit.extents

Invariant: header and extents tile the file in rising order, and so do its units.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Copy `size_bytes` of source file `file` at `source_offset` to `target_offset`, in bytes."""

    file: int
    source_offset: int
    target_offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Bytes `begin` to `end` of a target file: of its header first, then of the extents.

    Attributes:
        begin, end: the range.
        header: the bytes of the file's header that are in it.
        extents: the ranges of source files that make up the rest.
    """

    begin: int
    end: int
    header: bytes
    extents: tuple[Extent, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFile:
    """One weight file of the output: its first bytes, then extents in rising target order."""

    name: str
    header: bytes
    extents: tuple[Extent, ...]
    keys: tuple[str, ...]
    size_bytes: int

    def units(self, unit_bytes: int) -> Iterator[Unit]:
        """The units of the file, each of `unit_bytes` but for the last one."""
        extents = iter(self.extents)
        extent = next(extents, None)
        for begin in range(0, max(self.size_bytes, 1), unit_bytes):
            end = min(begin + unit_bytes, self.size_bytes)
            inside: list[Extent] = []
            while extent is not None and extent.target_offset < end:
                inside.append(_cut(extent, begin, end))
                if extent.target_offset + extent.size_bytes > end:
                    break
                extent = next(extents, None)
            yield Unit(begin=begin, end=end, header=self.header[begin:end], extents=tuple(inside))


def _cut(extent: Extent, begin: int, end: int) -> Extent:
    skip = max(begin - extent.target_offset, 0)
    size_bytes = min(extent.target_offset + extent.size_bytes, end) - extent.target_offset - skip
    if (skip, size_bytes) == (0, extent.size_bytes):
        return extent
    return replace(
        extent,
        source_offset=extent.source_offset + skip,
        target_offset=extent.target_offset + skip,
        size_bytes=size_bytes,
    )
