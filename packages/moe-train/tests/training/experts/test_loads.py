"""Where experts should lie by their rows, against every way to cut them."""

import random
from collections.abc import Callable
from itertools import combinations, pairwise

from moe_train.config import Config
from moe_train.training import read_model_config
from moe_train.training.experts.loads import ExpertLoads, balanced_parts

Configure = Callable[..., Config]


def all_parts(num_experts: int, ranks: int) -> list[tuple[int, ...]]:
    most = max(1, -(-2 * num_experts // ranks))
    cuts = combinations(range(1, num_experts), ranks - 1)
    found = [
        tuple(end - first for first, end in zip((0, *ends), (*ends, num_experts), strict=True))
        for ends in cuts
    ]
    return [parts for parts in found if max(parts) <= most]


def busiest(rows: list[int], parts: tuple[int, ...]) -> int:
    ends = [sum(parts[:rank]) for rank in range(len(parts) + 1)]
    return max(sum(rows[a:b]) for a, b in pairwise(ends))


def test_no_other_cuts_give_the_busiest_rank_fewer_rows() -> None:
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    for _ in range(150):
        ranks = chance.randrange(1, 6)
        rows = [
            chance.choice([0, chance.randrange(9), chance.randrange(100)])
            for _ in range(chance.randrange(ranks, 11))
        ]
        found = balanced_parts(rows, ranks)
        others = all_parts(len(rows), ranks)
        case = f"seed {seed}: {rows} over {ranks} ranks: {found}"
        assert found in others, case
        assert busiest(rows, found) == min(busiest(rows, each) for each in others), case


def test_parts_follow_the_sums_of_rows_since_the_layout_changed(configure: Configure) -> None:
    config = configure("parallel.ep=2")
    model, here = read_model_config(config), config.parallel
    loads = ExpertLoads()
    assert loads.balanced(here, model).expert_parts == ("0: 3,3", "1: 3,3")  # nothing is known
    assert loads.imbalance(here) == 1.0
    loads.add([[0] * 6, [6, 1, 0, 1, 0, 0]])
    loads.add([[0] * 6, [6, 1, 2, 0, 0, 0]])
    assert loads.rows_LE == [[0] * 6, [12, 2, 2, 1, 0, 0]]
    wanted = loads.balanced(here, model)
    assert wanted.expert_parts == ("0: 3,3", "1: 1,5")
    assert loads.imbalance(here) == 16 * 2 / 17
    assert loads.imbalance(wanted) == 12 * 2 / 17
    loads.clear()
    assert not loads.rows_LE
