"""A message consists of whole rows, which are as large as their payload says."""

import pytest

from comm_collectives.planning.wire.wire_format import MOVEMENTS, RowFormat, message_bytes


def test_what_choices_say_fills_whole_rows() -> None:
    row_format = RowFormat(hidden_size=13, itemsize=2, weight_itemsize=8)
    row = row_format.row_bytes
    assert row == 32
    for tokens, choices, dedup, flat in ((0, 0, 0, 0), (1, 1, 2, 2), (3, 5, 5, 7), (2, 16, 8, 20)):
        sizes = {"tokens": tokens, "choices": choices}
        assert message_bytes("dedup", "dispatch", row_format, **sizes) == dedup * row
        assert message_bytes("flat", "dispatch", row_format, **sizes) == flat * row
        assert message_bytes("dedup", "combine", row_format, **sizes) == 26 * tokens
        assert message_bytes("flat", "combine", row_format, **sizes) == 26 * choices


def test_block_scaled_rows_are_0_516_of_bfloat16() -> None:
    full = RowFormat(hidden_size=7168, itemsize=2, weight_itemsize=4)
    scaled = RowFormat(hidden_size=7168, itemsize=2, weight_itemsize=4, block_scaled=True)
    assert (full.row_bytes, scaled.row_bytes) == (14336, 7392)
    assert scaled.row_bytes / full.row_bytes == pytest.approx(0.516, abs=5e-4)


def test_combine_and_backwards_travel_in_full_unless_asked() -> None:
    scaled = RowFormat(hidden_size=256, itemsize=2, weight_itemsize=4, block_scaled=True)
    plain = {movement: scaled.during(movement).block_scaled for movement in MOVEMENTS}
    assert [movement for movement in MOVEMENTS if plain[movement]] == ["dispatch"]
    asked = [m for m in MOVEMENTS if scaled.during(m, quantize_backward=True).block_scaled]
    assert asked == ["dispatch", "dispatch_backward", "combine_backward"]
