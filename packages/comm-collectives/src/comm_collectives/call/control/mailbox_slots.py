"""How a mailbox lies in shared memory: for each rank two alternating slots, and a few words.

Invariant: a slot's number says what its bytes are. It is negative while they change, so whoever
finds the same positive number before and after reading has read one post, and all of it.

    areas = Areas(memory, size=2)
    slot = Slot(areas, rank=0)
    slot.numbers[0], slot.posted(1)
"""

from typing import final

from comm_collectives.call.signature import INLINE_BYTES, SIGNATURE_BYTES
from comm_collectives.units import CACHE_LINE_BYTES, WORD_BYTES, round_up


@final
class Slot:
    """What all ranks said in the calls of even, or of odd, numbers; as one rank sees it."""

    def __init__(self, areas: "Areas", rank: int) -> None:
        size = areas.size
        self.numbers = areas.take_words()  # by rank; negative while that number is being written
        self.part_numbers = areas.take_words()  # by rank: the last number that had parts
        self.commons = areas.take(size * SIGNATURE_BYTES)
        self.own_common = self.commons[rank * SIGNATURE_BYTES :][:SIGNATURE_BYTES]
        # By reader, then by writer, so that a reader's parts lie together.
        parts = [areas.take(size * INLINE_BYTES) for _ in range(size)]
        self.parts = parts[rank]
        self.own_parts = [part[rank * INLINE_BYTES :][:INLINE_BYTES] for part in parts]

    def posted(self, number: int) -> bool:
        """Whether every rank has posted `number` or a later call."""
        numbers = self.numbers.tolist()
        lowest = min(numbers)
        return lowest >= number or (lowest < -number and not self._missing(numbers, number))

    def missing(self, number: int) -> tuple[int, ...]:
        """Ranks that have posted neither `number` nor a later call."""
        return self._missing(self.numbers.tolist(), number)

    def _missing(self, numbers: list[int], number: int) -> tuple[int, ...]:
        # Who is writing number + 2 over it has posted it.
        return tuple(peer for peer, last in enumerate(numbers) if -number <= last < number)


@final
class Areas:
    """Cuts the shared memory into areas, the same on every rank, each on cache lines of its own."""

    def __init__(self, memory: memoryview, size: int) -> None:
        self._memory = memory
        self._next = 0
        self.size = size

    @staticmethod
    def num_bytes(size: int) -> int:
        """Bytes that a mailbox of `size` ranks needs."""
        words = round_up(size * WORD_BYTES, CACHE_LINE_BYTES)
        slot = (
            2 * words
            + size * SIGNATURE_BYTES
            + size * round_up(size * INLINE_BYTES, CACHE_LINE_BYTES)
        )
        return CACHE_LINE_BYTES + 2 * words + 2 * slot

    def take(self, num_bytes: int) -> memoryview:
        """Return the next area."""
        start = self._next
        self._next += round_up(num_bytes, CACHE_LINE_BYTES)
        return self._memory[start : start + num_bytes]

    def take_words(self) -> memoryview:
        """Return one 64-bit word for each rank."""
        return self.take(self.size * WORD_BYTES).cast("q")
