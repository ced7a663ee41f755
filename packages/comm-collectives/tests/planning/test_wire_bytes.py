"""Bytes against brute force: every row put into a message one by one, and the messages measured."""

import random
from collections import defaultdict

import pytest

from comm_collectives.planning.wire.wire_format import (
    MOVEMENTS,
    ROUTES,
    Movement,
    Route,
    RowFormat,
)
from comm_collectives.planning.wire_bytes import count_routing, wire_stages

_TO_EXPERTS = ("dispatch", "combine_backward")


def _padded(data: bytearray, alignment: int) -> bytearray:
    while len(data) % alignment:
        data.append(0)
    return data


def _row(movement: Movement, row_format: RowFormat) -> bytearray:
    """One row, written element by element."""
    row = bytearray()
    for _ in range(row_format.hidden_size):
        row += bytes(1 if row_format.block_scaled else row_format.itemsize)
    if row_format.block_scaled:
        _padded(row, 4)
        for _ in range(0, row_format.hidden_size, 128):
            row += bytes(4)
    if movement.startswith("dispatch"):
        _padded(row, row_format.weight_itemsize)
        _padded(row, 4 if row_format.block_scaled else max(4, row_format.itemsize))
    return row


def _message(
    route: Route, movement: Movement, row_format: RowFormat, rows: int, choices: int
) -> bytearray:
    """One message, written row by row and weight by weight."""
    row = _row(movement, row_format)
    message = bytearray()
    for _ in range(rows):
        message += row
    if movement.startswith("combine"):
        return message
    weights = bytearray()
    for _ in range(choices):
        weights += bytes(row_format.weight_itemsize)
    if route != "flat" and movement == "dispatch":
        _padded(weights, 4)
        for _ in range(choices):
            weights += bytes(4)
    return message + _padded(weights, len(row))


def _oracle(
    topk_idx: list[list[list[int]]],
    experts: int,
    per_node: int,
    route: Route,
    movement: Movement,
    row_format: RowFormat,
) -> list[list[list[int]]]:
    """Send each choice of each token on its way and measure what lies between each two ranks."""
    size = len(topk_idx)
    hops = 2 if route == "hierarchical" else 1
    rows: list[defaultdict[tuple[int, int], set[object]]] = [defaultdict(set) for _ in range(hops)]
    choices: list[defaultdict[tuple[int, int], int]] = [defaultdict(int) for _ in range(hops)]
    for source, tokens in enumerate(topk_idx):
        for t, chosen in enumerate(tokens):
            for k, expert in enumerate(chosen):
                at, target = source, expert // (experts // size)
                path = [target]
                if route == "hierarchical":
                    node = target // per_node
                    path = [node * per_node + source % per_node, target]
                for hop, step in enumerate(path):
                    row = (source, t, k) if route == "flat" else (source, t)
                    rows[hop][at, step].add(row)
                    choices[hop][at, step] += 1
                    at = step
    stages = [[[0] * size for _ in range(size)] for _ in range(hops)]
    for hop in range(hops):
        for (at, step), there in rows[hop].items():
            message = _message(route, movement, row_format, len(there), choices[hop][at, step])
            pair = (at, step) if movement in _TO_EXPERTS else (step, at)
            stages[hop][pair[0]][pair[1]] = len(message)
    return stages if movement in _TO_EXPERTS else stages[::-1]


def test_bytes_between_ranks_equal_messages_written_row_by_row() -> None:
    seed = random.randrange(10**9)
    generator = random.Random(seed)
    for _ in range(60):
        per_node = generator.randint(1, 3)
        size = per_node * generator.randint(1, 3)
        experts, topk = size * generator.randint(1, 3), generator.randint(1, 5)
        row_format = RowFormat(
            hidden_size=generator.choice([1, 3, 127, 130]),
            itemsize=generator.choice([2, 4, 8]),
            weight_itemsize=generator.choice([2, 4, 8]),
            block_scaled=generator.random() < 0.5,
        )
        # Some ranks without tokens, and experts that may be chosen twice by one token.
        topk_idx = [
            [
                [generator.randrange(experts) for _ in range(topk)]
                for _ in range(generator.choice([0, 1, 9]))
            ]
            for _ in range(size)
        ]
        counts = count_routing(topk_idx, num_experts=experts, ranks_per_node=per_node)
        for route in ROUTES:
            for movement in MOVEMENTS:
                want = _oracle(topk_idx, experts, per_node, route, movement, row_format)
                got = wire_stages(counts, route, movement, row_format)
                assert [[list(row) for row in stage.bytes_WW] for stage in got] == want, (
                    f"seed {seed}: {route} {movement} {row_format}"
                )


def test_hierarchical_stages_stay_on_their_links() -> None:
    generator = random.Random(3)
    topk_idx = [[generator.sample(range(24), 4) for _ in range(20)] for _ in range(6)]
    counts = count_routing(topk_idx, num_experts=24, ranks_per_node=2)
    row_format = RowFormat(hidden_size=8, itemsize=4, weight_itemsize=4)
    between, inside = wire_stages(counts, "hierarchical", "dispatch", row_format)
    assert (between.name, inside.name) == ("between nodes", "inside nodes")
    for source in range(6):
        for target in range(6):
            assert bool(between.bytes_WW[source][target]) == (source % 2 == target % 2)
            assert bool(inside.bytes_WW[source][target]) == (source // 2 == target // 2)
    back = wire_stages(counts, "hierarchical", "combine", row_format)
    assert [stage.name for stage in back] == ["inside nodes", "between nodes"]


def test_one_rank_per_node_makes_hierarchical_cost_what_dedup_costs_on_the_wire() -> None:
    generator = random.Random(4)
    topk_idx = [[generator.sample(range(8), 3) for _ in range(20)] for _ in range(4)]
    counts = count_routing(topk_idx, num_experts=8, ranks_per_node=1)
    row_format = RowFormat(hidden_size=8, itemsize=4, weight_itemsize=4)
    (ranks,) = wire_stages(counts, "dedup", "dispatch", row_format)
    between, inside = wire_stages(counts, "hierarchical", "dispatch", row_format)
    assert between.wire_bytes == ranks.wire_bytes > 0
    assert inside.wire_bytes == 0


def test_what_a_rank_keeps_is_not_on_the_wire() -> None:
    counts = count_routing([[[0], [1]], [[1]]], num_experts=2, ranks_per_node=1)
    row_format = RowFormat(hidden_size=4, itemsize=4, weight_itemsize=4)
    (stage,) = wire_stages(counts, "flat", "combine", row_format)
    assert stage.bytes_WW == ((16, 0), (16, 16))
    assert stage.wire_bytes == 16


def test_wrong_counts_name_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="num_experts=3 cannot be shared evenly by ranks=2"):
        count_routing([[], []], num_experts=3, ranks_per_node=1)
    with pytest.raises(ValueError, match="ranks=2 cannot be shared evenly by ranks_per_node=3"):
        count_routing([[], []], num_experts=4, ranks_per_node=3)
    with pytest.raises(ValueError, match=r"rank 1 has a token with choices \[0, 4\].*0\.\.3"):
        count_routing([[], [[0, 4]]], num_experts=4, ranks_per_node=1)
    with pytest.raises(ValueError, match="hidden_size=0 must be at least 1"):
        RowFormat(hidden_size=0, itemsize=2, weight_itemsize=4)
