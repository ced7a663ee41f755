import random

import torch

from weight_convert.compute.ranks import find_rank


def test_the_k_largest_are_those_of_a_stable_sort_whatever_the_chunks() -> None:
    for _ in range(100):
        total = random.randint(1, 60)
        values = torch.randn(total) if random.random() < 0.5 else torch.randint(-3, 3, (total,))
        values = values.float() * 10.0 ** random.randint(-42, 30)
        count = random.randint(0, total)
        parts = values.split(random.randint(1, total))
        rank = find_rank(lambda parts=parts: iter(parts), count)
        found = torch.cat([rank.above(part) for part in parts])
        order = values.abs().sort(descending=True, stable=True).indices
        expected = torch.zeros(total, dtype=torch.bool)
        expected[order[:count]] = True
        assert torch.equal(found, expected), (values, count)
