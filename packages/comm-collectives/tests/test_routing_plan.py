"""The plan against brute force: every row laid out one by one."""

import random

from comm_collectives.routing_plan import plan_routing, round_up, starts


def _positions(lengths: tuple[int, ...], shifts: tuple[int, ...]) -> list[int]:
    piece_of = [p for p, n in enumerate(lengths) for _ in range(n)]
    return [j + shifts[p] for j, p in enumerate(piece_of)]


def test_rows_and_weights_stand_where_a_loop_puts_them() -> None:
    seed = random.randrange(10**9)
    generator = random.Random(seed)
    for _ in range(100):
        size, local = generator.randint(1, 5), generator.randint(1, 4)
        sent = [[generator.choice([0, 0, 1, 7]) for _ in range(local)] for _ in range(size)]
        received = [[generator.choice([0, 2, 5]) for _ in range(local)] for _ in range(size)]
        per_row, alignment = generator.randint(1, 9), generator.choice([1, 4])
        plan = plan_routing(sent, received, weights_per_row=per_row, alignment=alignment)
        for side, counts in ((plan.source, sent), (plan.expert, received)):
            rows, weights, at = [], [], 0
            for row in counts:
                n = sum(row)
                rows += range(at, at + n)
                weights += range((at + n) * per_row, (at + n) * per_row + n)
                at += n + -(-n // per_row)
            assert _positions(side.rows_P, side.row_shift_P) == rows, f"seed {seed}"
            assert _positions(side.rows_P, side.weight_shift_P) == weights, f"seed {seed}"
            assert sum(side.wire_rows_P) == at
        where = {}
        at = 0
        for e in range(local):
            for src in range(size):
                for i in range(received[src][e]):
                    where[src, e, i] = at
                    at += 1
            at = round_up(at, 1) + plan.num_tokens_per_expert[e] - sum(r[e] for r in received)
        wire_order = [
            (src, e, i)
            for src in range(size)
            for e in range(local)
            for i in range(received[src][e])
        ]
        want = [where[key] for key in wire_order]
        assert _positions(plan.block_rows_B, plan.local_shift_B) == want, f"seed {seed}"
        assert all(n % alignment == 0 for n in plan.num_tokens_per_expert)
        assert plan.num_local_rows == at


def test_empty_expert_gets_no_padding() -> None:
    plan = plan_routing([[0, 3]], [[0, 3]], weights_per_row=1, alignment=8)
    assert plan.num_tokens_per_expert == (0, 8)
    assert plan.is_padded


def test_starts_of_nothing_is_nothing() -> None:
    assert starts([]) == []
    assert starts([2, 0, 3]) == [0, 2, 2]
