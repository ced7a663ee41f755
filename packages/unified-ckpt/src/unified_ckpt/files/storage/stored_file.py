"""Positioned reads of an object: ranges, two at a time, and gaps read over where that costs less.

file = StoredFile(location, pool)
file.read_at([buffer], 0)
"""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from unified_ckpt.files.storage.location import Location

# Of one request. A client holds it twice while it comes, and 4 MiB besides (connections, arenas of
# its threads); with that two of them stay below two parts of 8 MiB.
READ_BYTES = 3 * 1024 * 1024
PARTS_AT_ONCE = 2
_GAP_BYTES = 512 * 1024  # less than what comes in the time of one more request

_Span = tuple[int, list[tuple[int, memoryview]]]  # first byte, and (byte, where it goes) pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """An object that is read as a file; `pool` has as many threads as parts may be held at once."""

    location: Location
    pool: Executor

    def num_bytes(self) -> int:
        """Ask for the size."""
        size = self.location.store.size(self.location.key)
        if size is None:
            raise FileNotFoundError(f"{self.location}: no such object")
        return size

    def read_at(self, buffers: Sequence[memoryview], start: int) -> int:
        """Fill the buffers from byte `start`; return the bytes read, fewer only at the end."""
        return self._read(_parts(buffers, start))

    def read_runs(self, buffer: memoryview, starts: Iterable[int], run_bytes: int) -> int:
        """Fill a buffer with equally long runs; return the bytes read."""
        if run_bytes > READ_BYTES:
            done = 0
            for start in starts:
                got = self.read_at([buffer[done : done + run_bytes]], start)
                done += got
                if got != run_bytes:
                    break
            return done
        return self._read(_grouped(buffer, starts, run_bytes))

    def _read(self, spans: Iterable[_Span]) -> int:
        """Read spans, the next ones while one is waited for; stop at the first that is short."""
        total = 0
        waiting = []
        for span in spans:
            waiting.append(self.pool.submit(self._fill, span))
            if len(waiting) == PARTS_AT_ONCE:
                got, whole = waiting.pop(0).result()
                total += got
                if not whole:
                    break
        for future in waiting:
            got, whole = future.result()
            total += got
            if not whole:
                break
        return total

    def _fill(self, span: _Span) -> tuple[int, bool]:
        first, places = span
        last, buffer = places[-1]
        raw = memoryview(
            self.location.store.read(self.location.key, first, last + len(buffer) - first)
        )
        done = 0
        for start, place in places:
            got = raw[start - first : start - first + len(place)]
            place[: len(got)] = got
            done += len(got)
            if len(got) != len(place):
                return done, False
        return done, True


def _parts(buffers: Sequence[memoryview], start: int) -> Iterator[_Span]:
    """Cut what buffers want into spans of at most `READ_BYTES`."""
    first, places = start, list[tuple[int, memoryview]]()
    for buffer in buffers:
        while len(buffer):
            take = min(len(buffer), first + READ_BYTES - start)
            places.append((start, buffer[:take]))
            buffer, start = buffer[take:], start + take
            if start == first + READ_BYTES:
                yield first, places
                first, places = start, []
    if places:
        yield first, places


def _grouped(buffer: memoryview, starts: Iterable[int], run_bytes: int) -> Iterator[_Span]:
    """Join runs that lie close together into spans of at most `READ_BYTES`."""
    places: list[tuple[int, memoryview]] = []
    for number, start in enumerate(starts):
        if places:
            near = start - places[-1][0] - run_bytes <= _GAP_BYTES
            if not near or start + run_bytes - places[0][0] > READ_BYTES:
                yield places[0][0], places
                places = []
        places.append((start, buffer[number * run_bytes : (number + 1) * run_bytes]))
    if places:
        yield places[0][0], places
