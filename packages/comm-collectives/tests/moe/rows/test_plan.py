"""The plan against brute force: every row laid out one by one."""

import random

import torch

from comm_collectives.moe.rows.plan import plan_placing, repeat_each, spread, starts

_CPU = torch.device("cpu")


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
            placing = plan_placing(received, alignment=alignment, device=_CPU, blocks=blocks)
        else:
            placing = plan_placing(received, alignment=alignment, device=_CPU)
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
        assert placing.local_N.tolist() == want, f"seed {seed}"
        padding = sorted(set(range(at)) - set(want))
        assert (None if placing.padding is None else placing.padding.tolist()) == (padding or None)
        values = torch.arange(1, 2 * len(want) + 1)
        rows = placing.gather(values, torch.arange(0, 2 * len(want), 2))
        assert rows.tolist() == [2 * want.index(r) + 1 if r in want else 0 for r in range(at)]


def test_empty_expert_gets_no_padding() -> None:
    placing = plan_placing([[0, 3]], alignment=8, device=_CPU)
    assert placing.num_tokens_per_expert == (0, 8)
    assert placing.padding is not None
    assert placing.padding.tolist() == [3, 4, 5, 6, 7]


def test_pieces_count_up_from_their_first_numbers() -> None:
    assert starts([]) == []
    assert starts([2, 0, 3]) == [0, 2, 2]
    first, second = spread([[10, 5, 0], [1, 1, 1]], [2, 0, 3], _CPU)
    assert (first.tolist(), second.tolist()) == ([10, 11, 0, 1, 2], [1, 2, 1, 2, 3])
    assert repeat_each([[10, 5, 0]], [2, 0, 3], _CPU).tolist() == [[10, 10, 0, 0, 0]]
