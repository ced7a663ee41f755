"""The placement rules of torch's native caching allocator, without torch and without a device.

As in c10/cuda/CUDACachingAllocator: sizes in units of 512 B; requests up to 1 MiB from segments of
2 MiB, those below 10 MiB from segments of 20 MiB, larger ones in whole 2 MiB; best fit among the
free blocks of the stream and pool; no split of a large block that leaves 1 MiB or less; neighbours
merge. With expandable segments a stream's pool is one segment that grows at its end by pages of 2
or 20 MiB, every block is split, and the free block at the end is taken only where no other fits.
It is a model: a test holds it against torch's own allocator, both ways.

Invariant: the blocks of a segment cover it, and no two free ones are neighbours.

    NativeRules(expandable=False).peak_reserved(trace)
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple, final

from gpu_alloc.core import MIB
from gpu_alloc.events import TraceEvent
from gpu_alloc.torch.cache import UNIT_BYTES

_SMALL_SEGMENT_BYTES = 2 * MIB
_MIDDLE_SEGMENT_BYTES = 20 * MIB


class _Place(NamedTuple):
    """A block: of a segment, from an offset on; sorted as torch looks for the best one."""

    size: int
    segment: int
    offset: int


@final
class NativeRules:
    """One device without a limit; blocks go to and come from lists by (stream, pool).

    Args:
        expandable: the rules under `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`.
    """

    def __init__(self, *, expandable: bool) -> None:
        self.reserved_bytes = 0
        self._expandable = expandable
        self._num_segments = 0
        self._growing: dict[tuple[int, bool], tuple[int, int]] = {}  # pool: its segment, its end
        self._free: defaultdict[tuple[int, bool], list[_Place]] = defaultdict(list)
        self._free_at: dict[tuple[int, int], _Place] = {}  # by segment and where it begins
        self._free_end: dict[tuple[int, int], _Place] = {}
        self._used: dict[int, tuple[_Place, tuple[int, bool]]] = {}

    def peak_reserved(self, trace: Iterable[TraceEvent]) -> int:
        """Bytes that are reserved when the trace has run: without a limit nothing is given back."""
        for event in trace:
            if event.action == "alloc" and event.size_bytes:
                self._alloc(event.block_id, event.size_bytes, event.stream)
            elif event.action == "free" and event.block_id in self._used:
                self._give(event.block_id)
        return self.reserved_bytes

    def _alloc(self, block: int, requested: int, stream: int) -> None:
        size = -(-requested // UNIT_BYTES) * UNIT_BYTES
        is_small = size <= MIB
        pool = stream, is_small
        found = self._fitting(size, pool) or self._reserve(size, pool)
        rest = found.size - size
        if rest >= UNIT_BYTES if is_small or self._expandable else rest > MIB:
            self._put(_Place(rest, found.segment, found.offset + size), pool)
            found = found._replace(size=size)
        self._used[block] = found, pool

    def _fitting(self, size: int, pool: tuple[int, bool]) -> _Place | None:
        free = self._free[pool]
        at = bisect_left(free, _Place(size, -1, -1))
        if self._expandable and at + 1 < len(free):
            at += (free[at].segment, free[at].offset + free[at].size) == self._growing[pool]
        return self._take(free[at], pool) if at < len(free) else None

    def _reserve(self, size: int, pool: tuple[int, bool]) -> _Place:
        if self._expandable:
            return self._grow(size, pool)
        found = _Place(_segment_bytes(size), self._num_segments, 0)
        self._num_segments += 1
        self.reserved_bytes += found.size
        return found

    def _grow(self, size: int, pool: tuple[int, bool]) -> _Place:
        """The free block at the segment's end, or an empty one, with what it lacks in new pages."""
        segment, end = self._growing.get(pool, (len(self._growing), 0))
        last = self._free_end.get((segment, end))
        found = _Place(0, segment, end) if last is None else self._take(last, pool)
        page = _SMALL_SEGMENT_BYTES if pool[1] else _MIDDLE_SEGMENT_BYTES
        more = -(-(size - found.size) // page) * page
        self.reserved_bytes += more
        self._growing[pool] = segment, end + more
        return found._replace(size=found.size + more)

    def _give(self, block: int) -> None:
        (size, segment, offset), pool = self._used.pop(block)
        after = self._free_at.get((segment, offset + size))
        if after is not None:
            size += self._take(after, pool).size
        before = self._free_end.get((segment, offset))
        if before is not None:
            size, offset = size + self._take(before, pool).size, before.offset
        self._put(_Place(size, segment, offset), pool)

    def _put(self, place: _Place, pool: tuple[int, bool]) -> None:
        insort(self._free[pool], place)
        self._free_at[place.segment, place.offset] = place
        self._free_end[place.segment, place.offset + place.size] = place

    def _take(self, place: _Place, pool: tuple[int, bool]) -> _Place:
        free = self._free[pool]
        del free[bisect_left(free, place)]
        del self._free_at[place.segment, place.offset]
        del self._free_end[place.segment, place.offset + place.size]
        return place


def _segment_bytes(size: int) -> int:
    if size <= MIB:
        return _SMALL_SEGMENT_BYTES
    if size < _MIDDLE_SEGMENT_BYTES // 2:
        return _MIDDLE_SEGMENT_BYTES
    return -(-size // _SMALL_SEGMENT_BYTES) * _SMALL_SEGMENT_BYTES
