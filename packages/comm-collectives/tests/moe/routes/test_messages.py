"""Rows, weights and numbers of messages never touch each other, and fill the bytes planned."""

from itertools import accumulate

import pytest
import torch

from comm_collectives.moe.routes.messages import plan_messages, wire_row
from comm_collectives.planning.wire.wire_format import Movement, Route, message_bytes

_CPU = torch.device("cpu")


@pytest.mark.parametrize("route", ["flat", "dedup"])
@pytest.mark.parametrize("movement", ["dispatch", "dispatch_backward", "combine"])
@pytest.mark.parametrize(("hidden", "weight"), [(5, torch.float64), (3, torch.bfloat16)])
def test_sections_cover_each_message_without_overlap(
    route: Route, movement: Movement, hidden: int, weight: torch.dtype
) -> None:
    form = wire_row(movement, "full", hidden, torch.bfloat16, weight.itemsize)
    rows_P, choices_P = ([5, 0, 1], [5, 0, 1]) if route == "flat" else ([3, 0, 1], [5, 0, 1])
    messages = plan_messages(route, form, rows_P, choices_P, _CPU)
    sizes = [
        message_bytes(route, movement, form.size, tokens=u, choices=n)
        for u, n in zip(rows_P, choices_P, strict=True)
    ]
    row_bytes = form.wire_columns * 2
    assert [rows * row_bytes for rows in messages.rows_P] == sizes
    flat = torch.zeros(sum(sizes), dtype=torch.uint8)
    matrix = flat.view(torch.bfloat16).view(-1, form.wire_columns)
    row_U = torch.arange(sum(rows_P)) if messages.row_U is None else messages.row_U
    matrix[row_U] = 1
    assert (messages.number_N is not None) == (route == "dedup" and movement == "dispatch")
    used = [(row_U.tolist(), row_bytes), (messages.weight_N.tolist(), weight.itemsize)]
    if messages.number_N is not None:
        used.append((messages.number_N.tolist(), 4))
    if movement != "combine":
        assert [len(at) for at, _ in used[1:]] == [sum(choices_P)] * (len(used) - 1)
    taken = [at * size + byte for places, size in used for at in places for byte in range(size)]
    assert len(set(taken)) == len(taken)
    ends = [*accumulate(sizes)]
    assert max(taken) < ends[-1]
    # What is of a peer lies in its message.
    for places, size in used:
        counts = rows_P if size == row_bytes else choices_P
        first = 0
        for peer, count in enumerate(counts[: 3 if places else 0]):
            for at in places[first : first + count]:
                assert ends[peer] - sizes[peer] <= at * size < ends[peer]
            first += count


def test_gap_rows_hold_a_copy_of_row_0_at_first() -> None:
    form = wire_row("dispatch", "full", 4, torch.float32, 4)
    messages = plan_messages("flat", form, [2, 1], [2, 1], _CPU)
    assert messages.rows_P == [3, 2]
    assert messages.places(torch.tensor([7, 8, 9])).tolist() == [7, 8, 0, 9, 0]
