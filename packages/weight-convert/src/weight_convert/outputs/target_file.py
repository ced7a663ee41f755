"""A file to write, as ranges to copy, and its units: what is copied, checked and redone as one.

    for unit in plan.targets[0].units(32 << 20, len(plan.sources)):
        unit.begin, unit.end, unit.extents

Invariant: header and extents tile the file in rising order, and so do its units.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Copy `size_bytes` of source file `file` at `source_offset` to `target_offset`, in bytes.

    A number behind those of the sources is that of a computed tensor, which is written whole.
    """

    file: int
    source_offset: int
    target_offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sum:
    """The CRC-32 of bytes `begin` to `end` of a file, which is written at each of `places`."""

    begin: int
    end: int
    places: tuple[int, ...]


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
    """One weight file of the output: its first bytes, then extents in rising target order.

    When all of it is written, `sums` are put in.
    """

    name: str
    header: bytes
    extents: tuple[Extent, ...]
    keys: tuple[str, ...]
    size_bytes: int
    sums: tuple[Sum, ...] = ()

    def units(self, unit_bytes: int, num_sources: int) -> Iterator[Unit]:
        """The units of the file, each of at most `unit_bytes`, or one computed tensor.

        Args:
            unit_bytes: limit on what is copied as one.
            num_sources: files that can be copied from; behind them stand computed tensors.
        """
        begin, ranges = 0, list[Extent]()
        for extent in self.extents:
            if extent.file < num_sources:
                ranges.append(extent)
                continue
            yield from self._copied(begin, extent.target_offset, ranges, unit_bytes)
            end = extent.target_offset + extent.size_bytes
            yield Unit(begin=extent.target_offset, end=end, header=b"", extents=(extent,))
            begin, ranges = end, []
        yield from self._copied(begin, self.size_bytes, ranges, unit_bytes)

    def _copied(
        self, first: int, last: int, ranges: Iterable[Extent], unit_bytes: int
    ) -> Iterator[Unit]:
        """The units of a part of the file that is copied."""
        extents = iter(ranges)
        extent = next(extents, None)
        for begin in range(first, last, unit_bytes):
            end = min(begin + unit_bytes, last)
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
