"""The plan against brute force: every row laid out one by one."""

import random

from comm_collectives.moe.rows.plan import plan_placing, plan_wire, starts


def _positions(lengths: tuple[int, ...], shifts: tuple[int, ...]) -> list[int]:
    piece_of = [p for p, n in enumerate(lengths) for _ in range(n)]
    return [j + shifts[p] for j, p in enumerate(piece_of)]


def test_rows_and_weights_stand_where_a_loop_puts_them() -> None:
    seed = random.randrange(10**9)
    generator = random.Random(seed)
    for _ in range(100):
        counts = [generator.choice([0, 0, 1, 7]) for _ in range(generator.randint(1, 5))]
        per_row = generator.randint(1, 9)
        side = plan_wire(counts, per_row)
        rows, weights, at = [], [], 0
        for n in counts:
            rows += range(at, at + n)
            weights += range((at + n) * per_row, (at + n) * per_row + n)
            at += n + -(-n // per_row)
        assert _positions(side.rows_P, side.row_shift_P) == rows, f"seed {seed}"
        assert _positions(side.rows_P, side.weight_shift_P) == weights, f"seed {seed}"
        assert sum(side.wire_rows_P) == at


def test_choices_stand_where_a_loop_puts_them() -> None:
    """By expert, then by source, whatever the order of the blocks on the wire."""
    seed = random.randrange(10**9)
    generator = random.Random(seed)
    for _ in range(100):
        size, local = generator.randint(1, 5), generator.randint(1, 4)
        received = [[generator.choice([0, 2, 5]) for _ in range(local)] for _ in range(size)]
        alignment = generator.choice([1, 4])
        blocks = [(src, e) for src in range(size) for e in range(local)]
        if generator.random() < 0.5:
            generator.shuffle(blocks)
            placing = plan_placing(received, alignment=alignment, blocks=blocks)
        else:
            placing = plan_placing(received, alignment=alignment)
        where, at = {}, 0
        for e in range(local):
            first = at
            for src in range(size):
                for i in range(received[src][e]):
                    where[src, e, i] = at
                    at += 1
            at = first + -(-(at - first) // alignment) * alignment
            assert placing.num_tokens_per_expert[e] == at - first
        want = [where[src, e, i] for src, e in blocks for i in range(received[src][e])]
        assert _positions(placing.block_rows_B, placing.local_shift_B) == want, f"seed {seed}"
        assert (placing.num_rows, placing.num_choices) == (at, len(want))
        assert placing.is_padded == (at != len(want))


def test_empty_expert_gets_no_padding() -> None:
    placing = plan_placing([[0, 3]], alignment=8)
    assert placing.num_tokens_per_expert == (0, 8)
    assert placing.is_padded


def test_starts_of_nothing_is_nothing() -> None:
    assert starts([]) == []
    assert starts([2, 0, 3]) == [0, 2, 2]
