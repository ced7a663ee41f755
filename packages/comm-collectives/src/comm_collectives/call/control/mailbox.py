"""A group's mailbox in shared memory: who has arrived at call n, and what each rank says.

Every collective call begins with a control exchange, so it must cost microseconds. Each rank has
two alternating slots, since nobody posts n + 1 before it has read what all posted in n. A rank may
give up a call, however, and go on: its peers arrive later, and then see that it withdrew.

Invariants. A slot's number is taken back before its bytes change and written after them, so whoever
sees number n before and after reading has read n whole. Nothing is lost between a rank that gives
up and one that arrives at that moment: either all ranks find the call complete, or all find the
withdrawal (`withdraw` announces itself first, looks for late posts, and only then decides; ranks
that see it undecided wait for the decision). Only the death of a process can part them.

    mailbox = SharedMailbox.open(rank, size, all_gather)     # None: meet over the wire instead
    mailbox.post(1, b"what all read", None)
    arrival = mailbox.wait(1, timeout_s=30.0)
    if not arrival.complete:
        arrival = mailbox.withdraw(1)                # complete if the last one came just now
    heads = mailbox.commons(1)

One thread of a rank uses a mailbox at a time; the caller holds the lock.
"""

# gate: position - addresses of words in shared memory

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, final

from comm_collectives.base.transport import SYSTEM_CLOCK, Clock, Region
from comm_collectives.call.control.mailbox_slots import Areas, Slot
from comm_collectives.call.signature import INLINE_BYTES, SIGNATURE_BYTES
from comm_collectives.errors import CommValueError
from comm_collectives.units import CACHE_LINE_BYTES, POLL_S

_EVENT = 0  # the 32-bit word that changes when a call is complete or somebody withdraws
_TRIES = 8  # to read what a rank overwrites
_DECISION_S = 1.0  # longest wait for a peer that is about to give up or not: microseconds of work


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """Ranks (inside the group) that keep a call from being complete; all empty: everybody arrived.

    `missing` have not posted it; `withdrawn` gave it up; `dead` are those of either kind whose
    process is gone, or has closed the mailbox, before it could post or decide.
    """

    missing: tuple[int, ...]
    dead: tuple[int, ...]
    withdrawn: tuple[int, ...]

    @property
    def complete(self) -> bool:
        """Whether every rank has posted and none gave up."""
        return not (self.missing or self.withdrawn)


_COMPLETE = Arrival(missing=(), dead=(), withdrawn=())


class Shared(Protocol):
    """The memory under a mailbox: a `Region`, or the simulator's."""

    memory: memoryview
    rank: int
    size: int

    def fence(self) -> None:
        """Let all ranks see what was stored so far before anything else is read."""

    def wait_until(self, index: int, ready: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until `ready()`, asked again when word `index` is woken; False if it is not."""

    def wake(self, index: int) -> None:
        """Wake the ranks that wait on word `index`."""

    def dead(self) -> tuple[int, ...]:
        """Other ranks whose process is gone."""

    def close(self) -> None:
        """Leave."""


@final
class SharedMailbox:
    """Memory in which a group's ranks meet. A rank's calls are numbered 1, 2, 3, ..."""

    def __init__(
        self, region: Shared, *, clock: Clock = SYSTEM_CLOCK, look_s: float = POLL_S
    ) -> None:
        self._clock, self._look_s = clock, look_s
        areas = Areas(region.memory, region.size)
        self._region = region
        self._rank = region.rank
        self._size = region.size
        self._words = areas.take(CACHE_LINE_BYTES).cast("i")
        self._withdrawn = areas.take_words()  # by rank: 2 * number, plus 1 once it is decided
        self._completed = areas.take_words()  # by rank: the last call that it found complete
        self._slots = (Slot(areas, region.rank), Slot(areas, region.rank))
        self._events = 0
        self._last = 0

    @staticmethod
    def open(
        rank: int, size: int, all_gather: Callable[[bytes], list[bytes]]
    ) -> "SharedMailbox | None":
        """Open a mailbox for the `size` ranks of a group. Collective: every rank calls this.

        `all_gather` hands a message of at most 256 bytes to all ranks and returns everybody's, by
        rank.

        Returns:
            The mailbox; or None, on every rank, unless all of them share memory (see
            `Region.open`).

        Raises:
            CommError: whatever `all_gather` raises; nothing is left behind.
        """
        region = Region.open(rank, size, SharedMailbox.num_bytes(size), all_gather)
        return None if region is None else SharedMailbox(region)

    @staticmethod
    def num_bytes(size: int) -> int:
        """Return how much memory a mailbox of `size` ranks needs."""
        return Areas.num_bytes(size)

    def post(
        self,
        number: int,
        common: bytes,
        parts: Sequence[bytes] | None,
        *,
        beside: Callable[[], None] | None = None,
    ) -> None:
        """Say `common` (at most SIGNATURE_BYTES) to all, and `parts[r]` (INLINE_BYTES) to rank r.

        `parts` has one entry for each rank, this one included; None says nothing to anyone. Never
        waits. Shorter texts are padded with zero bytes. `beside` writes what lies beside the
        mailbox and belongs to this post.

        Raises:
            ValueError: `number` does not follow the last one, or something is too long.
        """
        self._check(number, common, parts)
        slot, rank = self._slots[number & 1], self._rank
        slot.numbers[rank] = -number
        slot.own_common[:] = common.ljust(SIGNATURE_BYTES, b"\0")
        if parts is not None:
            for place, part in zip(slot.own_parts, parts, strict=True):
                place[:] = part.ljust(INLINE_BYTES, b"\0")
            slot.part_numbers[rank] = number
        if beside is not None:
            beside()
        slot.numbers[rank] = number
        self._last = number
        # Of two ranks that post last at once, at least one sees both posts.
        self._region.fence()
        if slot.posted(number):
            self._announce()

    def wait(self, number: int, timeout_s: float) -> Arrival:
        """Wait until every rank has posted `number`, or one cannot or will not, or the limit.

        A peer that died or withdrew ends the wait early (death is noticed within 0.05 s), except
        that a call to which all have posted is complete even if somebody died since. May be called
        again for the same number. Other threads run meanwhile.
        """
        if self._found_complete(number):
            return _COMPLETE
        clock, region = self._clock, self._region
        deadline_s = clock.now_s() + timeout_s
        while True:
            left_s = min(self._look_s, max(0.0, deadline_s - clock.now_s()))
            done = region.wait_until(_EVENT, lambda: self._is_decided(number), left_s)
            arrival = self._arrival(number)
            if done or arrival.complete or arrival.dead:
                return arrival
            if clock.now_s() >= deadline_s:
                # Too late to wait for arrivals, but not for a peer that is just deciding.
                region.wait_until(_EVENT, lambda: not self._given_up(number)[1], _DECISION_S)
                return self._arrival(number)

    def withdraw(self, number: int) -> Arrival:
        """Give up waiting for `number`, and return what came of it, which is final for every rank.

        If the last rank arrived meanwhile it is a complete arrival, and the call goes on:
        the peers have seen it complete as well. Else every rank that waits for `number`, or comes
        to it later, finds this rank in `Arrival.withdrawn`; its bytes stay readable until this rank
        posts `number + 2`.
        """
        withdrawn, rank = self._withdrawn, self._rank
        before = withdrawn[rank]
        withdrawn[rank] = 2 * number
        self._region.fence()
        complete = self._slots[number & 1].posted(number)
        withdrawn[rank] = before if complete else 2 * number + 1
        self._announce()
        return self.wait(number, 0.0)

    def commons(self, number: int) -> list[bytes]:
        """What each rank said to all in call `number`, SIGNATURE_BYTES each, by rank; after `wait`.

        b"" for a rank that has not posted it, or has gone on so far that it is overwritten.
        """
        slot = self._slots[number & 1]
        before = slot.numbers.tolist()
        texts = _split(slot.commons.tobytes(), SIGNATURE_BYTES)
        return self._whole(texts, number, before, slot.numbers.tolist())

    def parts(self, number: int) -> list[bytes]:
        """What each rank said to this one in call `number`, INLINE_BYTES each, by rank.

        Zero bytes for a rank that posted None; b"" as in `commons`.
        """
        slot = self._slots[number & 1]
        before = slot.numbers.tolist()
        written = slot.part_numbers.tolist()
        texts = _split(slot.parts.tobytes(), INLINE_BYTES)
        if written != [number] * self._size:
            nothing = bytes(INLINE_BYTES)
            texts = [
                text if wrote == number else nothing
                for text, wrote in zip(texts, written, strict=True)
            ]
        return self._whole(texts, number, before, slot.numbers.tolist())

    def overwritten(self, number: int) -> tuple[int, ...]:
        """Ranks that have begun to write over their post of call `number`."""
        numbers = self._slots[number & 1].numbers.tolist()
        return tuple(peer for peer, last in enumerate(numbers) if last != number)

    def all_equal(self, number: int, common: bytes) -> bool:
        """Whether every rank said `common` in call `number`; after a complete `wait`."""
        slot = self._slots[number & 1]
        expected = common.ljust(SIGNATURE_BYTES, b"\0") * self._size
        return slot.commons.tobytes() == expected and slot.numbers.tolist() == [number] * self._size

    def last_posted(self) -> list[tuple[int, bytes]]:
        """Number and signature of each rank's last post, by rank; 0, b"" if none.

        For reports: at any time, whatever the peers do meanwhile.
        """
        return [self._last_of(peer) for peer in range(self._size)]

    def dead(self) -> tuple[int, ...]:
        """Other ranks whose process is gone or has closed the mailbox.

        Raises:
            CommError: this rank has closed the mailbox.
        """
        return self._region.dead()

    def close(self) -> None:
        """Leave the mailbox: peers that wait for this rank find it dead. Twice is harmless."""
        self._region.close()

    def _check(self, number: int, common: bytes, parts: Sequence[bytes] | None) -> None:
        if number != self._last + 1:
            raise CommValueError(f"post {number} follows post {self._last}; numbers go 1, 2, ...")
        if len(common) > SIGNATURE_BYTES:
            raise CommValueError(f"common has {len(common)} bytes; at most {SIGNATURE_BYTES} fit")
        if parts is not None and (len(parts) != self._size or max(map(len, parts)) > INLINE_BYTES):
            raise CommValueError(
                f"parts have {[len(part) for part in parts]} bytes; give {self._size} parts "
                f"of at most {INLINE_BYTES}"
            )

    def _announce(self) -> None:
        """Wake those who wait, by a value of the event word that no rank ever wrote before."""
        self._events += 1
        self._words[_EVENT] = (self._events * self._size + self._rank) & 0x7FFFFFFF
        self._region.wake(_EVENT)

    def _found_complete(self, number: int) -> bool:
        """Whether all have posted and nobody ever withdrew since; notes it."""
        # Numbers first: who withdraws in vain has said so before the last post could be seen.
        arrived = self._slots[number & 1].posted(number)
        if arrived and max(self._withdrawn.tolist()) < 2 * number:
            self._completed[self._rank] = number
            return True
        return False

    def _is_decided(self, number: int) -> bool:
        """Whether the call is complete or given up, and nobody is about to decide that."""
        arrived = self._slots[number & 1].posted(number)
        if max(self._withdrawn.tolist()) < 2 * number:
            return arrived
        given_up, undecided = self._given_up(number)
        return not undecided and (arrived or bool(given_up))

    def _given_up(self, number: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Ranks that gave the call up, and ranks that are about to or not."""
        withdrawn = self._withdrawn.tolist()
        completed = self._completed.tolist()
        # A later withdrawal of a rank that had found this call complete says nothing here.
        late = [
            peer
            for peer in range(self._size)
            if withdrawn[peer] >= 2 * number and completed[peer] < number
        ]
        return (
            tuple(peer for peer in late if withdrawn[peer] != 2 * number),
            tuple(peer for peer in late if withdrawn[peer] == 2 * number),
        )

    def _arrival(self, number: int) -> Arrival:
        """How the call stands; notes that it is complete."""
        if self._found_complete(number):
            return _COMPLETE
        # The dead first: a rank that posted and then died has arrived.
        dead = self._region.dead()
        missing = self._slots[number & 1].missing(number)
        given_up, undecided = self._given_up(number)
        if not (missing or given_up or undecided):
            self._completed[self._rank] = number
        return Arrival(
            missing=missing,
            dead=tuple(peer for peer in dead if peer in missing or peer in undecided),
            withdrawn=tuple(sorted(given_up + undecided)),
        )

    def _whole(
        self, texts: list[bytes], number: int, before: list[int], after: list[int]
    ) -> list[bytes]:
        """The texts that were not being written while they were read."""
        if before == after == [number] * self._size:
            return texts
        return [
            text if first == last == number else b""
            for text, first, last in zip(texts, before, after, strict=True)
        ]

    def _last_of(self, peer: int) -> tuple[int, bytes]:
        start = peer * SIGNATURE_BYTES
        number = 0
        for _ in range(_TRIES):
            slot = max(self._slots, key=lambda slot: slot.numbers[peer])
            number = slot.numbers[peer]
            text = slot.commons[start : start + SIGNATURE_BYTES].tobytes()
            if slot.numbers[peer] == number:
                return (number, text) if number > 0 else (0, b"")
        return number, b""


def _split(texts: bytes, each: int) -> list[bytes]:
    return [texts[start : start + each] for start in range(0, len(texts), each)]
