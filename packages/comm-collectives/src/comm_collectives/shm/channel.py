"""Steps that the ranks of one host take together over shared memory.

In each step a rank fills its own slot and says what it is about to do, announces the step, waits
until all have announced it, and reads the others' slots. There are two slots for each rank, used in
turn: who announces a step has read everything of the step before the last, so the slot that comes
next is free, and copying into it overlaps with the others' reading. Data of any length therefore
streams through a bounded region, of at most 4 MiB for two ranks and about 16 MiB for up to 128.

All ranks count the same steps. A rank that gives up in the middle of a call says so and takes no
further step; the others then fail in that call too, or leave before they begin the next one.

    channel = Channel.open(rank, ranks, all_gather)       # None if the ranks share no memory
    channel.begin()
    ctypes.memmove(channel.mine(), source, num_bytes)
    channel.announce(head)
    if channel.arrived(deadline):
        ctypes.memmove(target, channel.theirs(peer), num_bytes)
"""

# gate: position - addresses of words in shared memory

import math
import mmap
import time
from collections.abc import Callable, Sequence
from typing import final

import torch

from comm_collectives.base.transport import Region
from comm_collectives.errors import CommError, PeerFailedError
from comm_collectives.units import CACHE_LINE_BYTES, WORD_BYTES, round_up

# For each rank a cache line: the last step that it announced, and the first step of the call in
# which it gave up (0: none).
_LINE_WORDS = 8
_LEFT = 1
_FIXED_HEAD_BYTES = 64
_SLOT_BYTES = (1 << 16, 1 << 20)  # smallest and largest
_REGION_BYTES = 1 << 24
# How often a rank that waits asks whether the others are still alive.
_LOOK_S = 0.2


class LeftEarlierError(CommError):
    """A peer has left the channel before this call: the call has to go another way."""


@final
class Channel:
    """The shared steps of one group on this rank; used by one thread at a time.

    Attributes:
        rank: this rank's number in the group.
        size: number of ranks.
        capacity: bytes that a rank can hand to the others in one step. Rounding each of up to
            `size` pieces up to `CACHE_LINE_BYTES` is provided for on top.
        names: what the ranks are called in errors.
        is_open: False once this rank has left.
    """

    def __init__(self, region: Region, names: Sequence[int]) -> None:
        self.rank, self.size = region.rank, region.size
        self.capacity = _capacity(self.size)
        self.is_open = True
        self.names = tuple(names)
        self._region = region
        self._others = tuple(rank for rank in range(self.size) if rank != self.rank)
        lines_bytes = self.size * _LINE_WORDS * WORD_BYTES
        self._words = region.memory[:lines_bytes].cast("q")
        self._line = self.rank * _LINE_WORDS
        self._head_bytes = _head_bytes(self.size)
        self._head_at = lines_bytes
        slot_bytes = _slot_bytes(self.size)
        start = _slots_at(self.size)
        self._slots = [
            region.tensor[at : at + slot_bytes]
            for at in range(start, start + 2 * self.size * slot_bytes, slot_bytes)
        ]
        self._typed = {torch.uint8: self._slots}
        self._step = 0
        self._first = 1

    @staticmethod
    def open(
        rank: int, names: Sequence[int], all_gather: Callable[[bytes], list[bytes]]
    ) -> "Channel | None":
        """Find out whether the ranks share memory. Collective; None on all of them if not.

        `names` are what the ranks are called in errors (their global numbers). `all_gather` and
        what it may raise are those of `Region.open`.
        """
        size = len(names)
        num_bytes = _slots_at(size) + 2 * size * _slot_bytes(size)
        region = Region.open(rank, size, num_bytes, all_gather)
        return None if region is None else Channel(region, names)

    def begin(self) -> None:
        """Begin a call: the steps until the next `begin` belong to it."""
        self._first = self._step + 1

    def mine(self) -> int:
        """Address of this rank's slot in the coming step."""
        return self.my_tensor(torch.uint8).data_ptr()

    def theirs(self, rank: int) -> int:
        """Address of a rank's slot in the step announced last; valid once all have arrived."""
        return self.their_tensor(rank, torch.uint8).data_ptr()

    def my_tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """Return this rank's slot in the coming step as a flat tensor."""
        return self._as(dtype)[(self._step + 1) % 2 * self.size + self.rank]

    def their_tensor(self, rank: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a rank's slot in the step announced last as a flat tensor."""
        return self._as(dtype)[self._step % 2 * self.size + rank]

    def announce(self, head: bytes | None = None) -> None:
        """Let the others see the slot, and what this rank is about to do (`heads`)."""
        step = self._step + 1
        if head is not None:
            at = self._head_place(step, self.rank)
            self._region.memory[at : at + len(head)] = head
        self._words[self._line] = self._step = step
        self._region.wake(2 * self._line)

    def heads(self, num_bytes: int) -> list[bytes]:
        """Return the first bytes of every rank's head in the step announced last."""
        places = [self._head_place(self._step, rank) for rank in range(self.size)]
        return [bytes(self._region.memory[at : at + num_bytes]) for at in places]

    def arrived(self, deadline: float) -> bool:
        """Wait until all ranks have announced this step; False if `deadline` comes first.

        A deadline of minus infinity only looks.

        Raises:
            PeerFailedError: a peer is dead, or gave up in this call.
            LeftEarlierError: a peer gave up in an earlier call.
        """
        words, step = self._words, self._step
        for rank in self._others:
            if words[rank * _LINE_WORDS] < step and (
                deadline == -math.inf or not self._await(rank, deadline)
            ):
                return False
        for rank in self._others:
            if words[rank * _LINE_WORDS + _LEFT] == self._first:
                raise self._failed(rank)
        return True

    def missing(self) -> list[int]:
        """Names of the ranks that have not announced this step."""
        words, step = self._words, self._step
        return [self.names[rank] for rank in self._others if words[rank * _LINE_WORDS] < step]

    def leave(self) -> None:
        """Give up in this call, and tell the others: this rank takes no further step."""
        if self.is_open:
            self.is_open = False
            self._words[self._line + _LEFT] = self._first
            self._region.wake(2 * self._line)

    def close(self) -> None:
        """End the use of the shared memory; the others see this rank as dead."""
        self.is_open = False
        self._region.close()

    def _await(self, rank: int, deadline: float) -> bool:
        words, step, at = self._words, self._step, rank * _LINE_WORDS

        def ready() -> bool:
            return words[at] >= step or words[at + _LEFT] != 0

        while True:
            left_s = deadline - time.monotonic()
            came = self._region.wait_until(2 * at, ready, max(0.0, min(left_s, _LOOK_S)))
            if words[at] >= step:
                return True
            # In this order: what a rank did before it died or left, it did.
            if rank in self._region.dead() and words[at] < step:
                raise PeerFailedError(
                    f"connection closed by peer: rank {self.names[rank]} is gone "
                    "(its process ended, or it destroyed the group)"
                )
            if came:
                raise self._failed(rank)
            if left_s <= _LOOK_S:
                return False

    def _failed(self, rank: int) -> CommError:
        name = self.names[rank]
        if self._words[rank * _LINE_WORDS + _LEFT] < self._first:
            return LeftEarlierError(f"rank {name} has left the shared memory")
        absent = [str(missing) for missing in self.missing() if missing != name]
        return PeerFailedError(
            f"connection closed by peer: rank {name} gave up in this call"
            + (f"; did not arrive: rank {', rank '.join(absent)}" if absent else "")
        )

    def _as(self, dtype: torch.dtype) -> list[torch.Tensor]:
        typed = self._typed.get(dtype)
        if typed is None:
            typed = self._typed[dtype] = [slot.view(dtype) for slot in self._slots]
        return typed

    def _head_place(self, step: int, rank: int) -> int:
        return self._head_at + (step % 2 * self.size + rank) * self._head_bytes


def _head_bytes(size: int) -> int:
    """Room for what a rank says of itself: 64 bytes, and two words for each rank."""
    return _FIXED_HEAD_BYTES + round_up(2 * WORD_BYTES * size, CACHE_LINE_BYTES)


def _capacity(size: int) -> int:
    smallest, largest = _SLOT_BYTES
    fair = _REGION_BYTES // (2 * size) // mmap.PAGESIZE * mmap.PAGESIZE
    return min(max(fair, smallest), largest)


def _slot_bytes(size: int) -> int:
    rounding = CACHE_LINE_BYTES * (size + 1)
    return round_up(_capacity(size) + rounding, mmap.PAGESIZE)


def _slots_at(size: int) -> int:
    used = size * _LINE_WORDS * WORD_BYTES + 2 * size * _head_bytes(size)
    return round_up(used, mmap.PAGESIZE)
