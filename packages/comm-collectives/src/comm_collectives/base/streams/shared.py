"""Streams through memory that the ranks of one host share: a ring for each pair and direction.

The sender counts what it wrote, the receiver what it read, each in a word of its own, so neither
waits for a lock. Long data travels in pieces, of which one is read while the next is written. Who
waits sleeps on a bell of its own, which is rung only while it sleeps.

Invariant: a count is stored after the bytes that it counts (see `Region`); rings never grow, so the
memory of a group is bounded whatever is sent: 1 MiB for two ranks, at most 8 for up to 45.

    streams = ShmStreams.open(rank, size, all_gather)      # None if the ranks share no memory
"""

import ctypes
import time
from collections.abc import Callable, Collection
from typing import final

from comm_collectives.base.streams.streams import Streams
from comm_collectives.base.transport import Region
from comm_collectives.units import CACHE_LINE_BYTES, POLL_S, WORD_BYTES

_RINGS_BYTES = 1 << 23  # all rings together
_RING_BYTES = (1 << 12, 1 << 19)  # smallest and largest; powers of two
_PIECE_BYTES = 1 << 17
# Below, a slice costs less than finding out the address; above, other threads run meanwhile.
_SLICE_BYTES = 1 << 14
_LEAVE_FREE = 7  # times what is taken: the memory that is shared also serves data loaders
_LINE_WORDS = CACHE_LINE_BYTES // WORD_BYTES


@final
class _Ring:
    """One direction of one pair, as either of its ends sees it."""

    __slots__ = ("address", "done", "memory", "num_bytes", "other", "own", "words")

    def __init__(self, words: memoryview, own: int, other: int, memory: memoryview) -> None:
        self.words, self.own, self.other = words, own, other
        self.memory, self.num_bytes = memory, len(memory)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.done = 0  # bytes that this end wrote, or read


@final
class ShmStreams(Streams):
    """See the module. `open` makes them."""

    def __init__(self, region: Region) -> None:
        self.rank, self.size = region.rank, region.size
        self._region = region
        bells_bytes, counts_bytes, _ = _layout(self.size)
        self._bells = region.memory[:bells_bytes].cast("i")
        words = region.memory[bells_bytes : bells_bytes + counts_bytes].cast("q")
        others = [peer for peer in range(self.size) if peer != self.rank]
        self._out = {peer: self._ring(words, self.rank, peer, is_out=True) for peer in others}
        self._in = {peer: self._ring(words, peer, self.rank, is_out=False) for peer in others}
        self._own_bell = self.rank * _LINE_WORDS * 2
        self._rung = 0
        self._gone: tuple[int, ...] = ()

    @staticmethod
    def open(
        rank: int, size: int, all_gather: Callable[[bytes], list[bytes]]
    ) -> "ShmStreams | None":
        """Open the streams of a group's ranks. Collective.

        None on every rank if the ranks share no memory, or too little of it is free. `all_gather`
        and what it may raise are those of `Region.open`.
        """
        num_bytes = ShmStreams.num_bytes(size)
        spare_bytes = _LEAVE_FREE * num_bytes
        region = Region.open(rank, size, num_bytes, all_gather, spare_bytes=spare_bytes)
        return None if region is None else ShmStreams(region)

    @staticmethod
    def num_bytes(size: int) -> int:
        """Return how much memory the streams of `size` ranks take."""
        bells_bytes, counts_bytes, ring_bytes = _layout(size)
        return bells_bytes + counts_bytes + size * (size - 1) * ring_bytes

    def send_some(self, peer: int, data: memoryview) -> int:
        """See Streams."""
        ring, sent = self._out[peer], 0
        while sent < len(data):
            room = ring.num_bytes - (ring.done - ring.words[ring.other])
            if not room:
                return len(data) if peer in self._gone else sent
            at = ring.done % ring.num_bytes
            count = min(len(data) - sent, room, ring.num_bytes - at, _PIECE_BYTES)
            _copy_in(ring, at, data[sent : sent + count])
            ring.done += count
            ring.words[ring.own] = ring.done
            self._ring_bell(peer)
            sent += count
        return sent

    def recv_some(self, peer: int, into: memoryview) -> int:
        """See Streams."""
        ring, got = self._in[peer], 0
        while got < len(into):
            there = ring.words[ring.other] - ring.done
            if not there:
                break
            at = ring.done % ring.num_bytes
            count = min(len(into) - got, there, ring.num_bytes - at, _PIECE_BYTES)
            _copy_out(ring, at, into[got : got + count])
            ring.done += count
            ring.words[ring.own] = ring.done
            self._region.fence()
            # Only a sender that found the ring full may wait for room; others sleep on.
            if ring.words[ring.other] - ring.done + count == ring.num_bytes:
                self._ring_bell(peer)
            got += count
        return got

    def ready(self) -> Collection[int]:
        """See Streams."""
        return [peer for peer, ring in self._in.items() if ring.words[ring.other] != ring.done]

    def wait(self, receiving: Collection[int], sending: Collection[int], timeout_s: float) -> None:
        """See Streams."""
        sources = [self._in[peer] for peer in receiving]
        targets = [self._out[peer] for peer in sending]

        def ready() -> bool:
            return any(ring.words[ring.other] != ring.done for ring in sources) or any(
                ring.done - ring.words[ring.other] < ring.num_bytes for ring in targets
            )

        deadline = time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, deadline - time.monotonic())
            known = self._gone
            if self._region.wait_until(self._own_bell, ready, min(left_s, POLL_S)):
                return
            if self.gone() != known or left_s <= POLL_S:
                return

    def gone(self) -> tuple[int, ...]:
        """See Streams."""
        self._gone = self._region.dead()
        return self._gone

    def close(self) -> None:
        """See Streams."""
        self._region.close()

    def _ring(self, words: memoryview, src: int, dst: int, *, is_out: bool) -> _Ring:
        bells_bytes, counts_bytes, ring_bytes = _layout(self.size)
        number = src * (self.size - 1) + dst - (dst > src)
        at = bells_bytes + counts_bytes + number * ring_bytes
        written = 2 * number * _LINE_WORDS
        read = written + _LINE_WORDS
        own, other = (written, read) if is_out else (read, written)
        return _Ring(words, own, other, self._region.memory[at : at + ring_bytes])

    def _ring_bell(self, peer: int) -> None:
        """Wake a rank, if it sleeps, by a value that no rank ever wrote there before."""
        self._rung += 1
        bell = peer * _LINE_WORDS * 2
        self._bells[bell] = (self._rung * self.size + self.rank) & 0x7FFFFFFF
        self._region.wake(bell)


def _layout(size: int) -> tuple[int, int, int]:
    """Bytes of all bells, of the counts of all rings, and of one ring."""
    rings = max(1, size * (size - 1))
    smallest, largest = _RING_BYTES
    fair = _RINGS_BYTES // rings
    ring = min(max(1 << (fair.bit_length() - 1), smallest), largest)
    return size * CACHE_LINE_BYTES, 2 * rings * CACHE_LINE_BYTES, ring


def _copy_in(ring: _Ring, at: int, data: memoryview) -> None:
    if len(data) <= _SLICE_BYTES or data.readonly:
        ring.memory[at : at + len(data)] = data
    else:
        source = ctypes.addressof(ctypes.c_char.from_buffer(data))
        ctypes.memmove(ring.address + at, source, len(data))


def _copy_out(ring: _Ring, at: int, into: memoryview) -> None:
    if len(into) <= _SLICE_BYTES:
        into[:] = ring.memory[at : at + len(into)]
    else:
        target = ctypes.addressof(ctypes.c_char.from_buffer(into))
        ctypes.memmove(target, ring.address + at, len(into))
