"""The sections of a message are aligned, and its rows are as large as their payload says."""

import pytest

from comm_collectives.planning.wire.wire_format import MOVEMENTS, RowFormat, message_layout


def test_sections_of_a_message_are_aligned_and_large_enough() -> None:
    row_format = RowFormat(hidden_size=13, itemsize=2, weight_itemsize=8)
    for tokens, choices in ((0, 0), (1, 1), (3, 5), (2, 16)):
        layout = message_layout("dedup", "dispatch", row_format, tokens=tokens, choices=choices)
        assert layout.index_at % 16 == layout.weights_at % 16 == layout.num_bytes % 16 == 0
        assert layout.index_at >= tokens * row_format.row_bytes
        assert layout.weights_at - layout.index_at >= choices * 4
        assert layout.num_bytes - layout.weights_at >= choices * 8
        flat = message_layout("flat", "dispatch", row_format, tokens=tokens, choices=choices)
        assert flat.weights_at == choices * row_format.row_bytes
        assert flat.num_bytes % row_format.row_bytes == 0
        assert flat.num_bytes - flat.weights_at >= choices * 8


def test_block_scaled_rows_are_0_516_of_bfloat16() -> None:
    full = RowFormat(hidden_size=7168, itemsize=2, weight_itemsize=4)
    scaled = RowFormat(hidden_size=7168, itemsize=2, weight_itemsize=4, block_scaled=True)
    assert (full.row_bytes, scaled.row_bytes) == (14336, 7392)
    assert scaled.row_bytes / full.row_bytes == pytest.approx(0.516, abs=5e-4)
    assert scaled.num_blocks == 56


def test_combine_and_backwards_travel_in_full_unless_asked() -> None:
    scaled = RowFormat(hidden_size=256, itemsize=2, weight_itemsize=4, block_scaled=True)
    plain = {movement: scaled.during(movement).block_scaled for movement in MOVEMENTS}
    assert [movement for movement in MOVEMENTS if plain[movement]] == ["dispatch"]
    asked = [m for m in MOVEMENTS if scaled.during(m, quantize_backward=True).block_scaled]
    assert asked == ["dispatch", "dispatch_backward", "combine_backward"]
