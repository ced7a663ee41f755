"""Sections of messages never touch each other, and end where the layout says."""

import torch

from comm_collectives.moe.routes.hop_messages import Messages
from comm_collectives.planning.wire.wire_format import RowFormat, message_layout


def test_sections_cover_each_message_without_overlap() -> None:
    size = RowFormat(hidden_size=5, itemsize=2, weight_itemsize=8)
    rows_P, choices_P = [3, 0, 1], [5, 0, 1]
    messages = Messages("dispatch", size, rows_P=rows_P, choices_P=choices_P)
    flat = torch.zeros(messages.num_bytes, dtype=torch.uint8)
    rows = messages.rows(flat, torch.bfloat16)
    numbers = messages.row_numbers(flat)
    weights = messages.weights(flat, torch.float64)
    assert [list(view.shape) for view in rows] == [[3, 8], [0, 8], [1, 8]]
    assert [view.numel() for view in numbers] == [view.numel() for view in weights] == choices_P
    for p, views in enumerate(zip(rows, numbers, weights, strict=True)):
        for value, view in enumerate(views):
            view.fill_(1 + 10 * p + value)
    for p, (row, number, weight) in enumerate(zip(rows, numbers, weights, strict=True)):
        assert bool((row == 1 + 10 * p).all())
        assert bool((number == 2 + 10 * p).all())
        assert bool((weight == 3 + 10 * p).all())
    for u, n, num_bytes in zip(rows_P, choices_P, messages.bytes_P, strict=True):
        layout = message_layout("dedup", "dispatch", size, tokens=u, choices=n)
        assert num_bytes == layout.num_bytes


def test_gradients_travel_without_row_numbers() -> None:
    size = RowFormat(hidden_size=4, itemsize=4, weight_itemsize=4)
    out = Messages("dispatch", size, rows_P=[2], choices_P=[4])
    back = Messages("dispatch_backward", size, rows_P=[2], choices_P=[4])
    assert out.num_bytes - back.num_bytes == 16
