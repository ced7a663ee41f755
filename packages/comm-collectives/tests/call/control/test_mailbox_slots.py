"""How a mailbox lies in memory: nothing overlaps, and who writes is told from who is late."""

import pytest

from comm_collectives.call.control.mailbox_slots import Areas, Slot
from comm_collectives.call.signature import INLINE_BYTES, SIGNATURE_BYTES
from comm_collectives.units import CACHE_LINE_BYTES


def test_rank_that_writes_over_a_call_has_posted_it() -> None:
    slot = Slot(Areas(memoryview(bytearray(Areas.num_bytes(2))), 2), rank=0)
    slot.numbers[0] = 3
    seen = []
    for word in (1, -3, 3, -5, 5):
        slot.numbers[1] = word
        seen.append((slot.posted(3), slot.missing(3)))
    assert seen == [(False, (1,)), (False, (1,)), (True, ()), (True, ()), (True, ())]


@pytest.mark.parametrize("size", [1, 2, 5, 9])
def test_slots_of_all_ranks_share_commons_and_overlap_nowhere(size: int) -> None:
    """Each rank fills what is its own with a number of its own; each finds all of it."""
    memory = memoryview(bytearray(Areas.num_bytes(size)))
    areas = [Areas(memory, size) for _ in range(size)]
    heads = [(area.take(CACHE_LINE_BYTES), area.take_words(), area.take_words()) for area in areas]
    ranks = [(Slot(area, rank), Slot(area, rank)) for rank, area in enumerate(areas)]
    for rank, slots in enumerate(ranks):
        for parity, slot in enumerate(slots):
            key = 1 + 2 * rank + parity
            slot.numbers[rank] = slot.part_numbers[rank] = key
            slot.own_common[:] = bytes([key]) * SIGNATURE_BYTES
            for dst, part in enumerate(slot.own_parts):
                part[:] = bytes([100 + key]) * (INLINE_BYTES - 1) + bytes([dst])
    assert not any(word for head in heads for words in head for word in words)
    keys = [[1 + 2 * rank + parity for rank in range(size)] for parity in (0, 1)]
    for rank, slots in enumerate(ranks):
        for parity, slot in enumerate(slots):
            assert slot.numbers.tolist() == slot.part_numbers.tolist() == keys[parity]
            assert bytes(slot.commons) == b"".join(
                bytes([k]) * SIGNATURE_BYTES for k in keys[parity]
            )
            assert bytes(slot.parts) == b"".join(
                bytes([100 + k]) * (INLINE_BYTES - 1) + bytes([rank]) for k in keys[parity]
            )


def test_mailbox_of_64_ranks_fits_into_4_mib() -> None:
    assert Areas.num_bytes(64) < 4 << 20
