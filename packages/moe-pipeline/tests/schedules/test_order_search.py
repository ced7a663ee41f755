from dataclasses import replace
from random import Random

import pytest

from moe_pipeline.errors import ScheduleError
from moe_pipeline.schedules.generators.catalog import SCHEDULES
from moe_pipeline.schedules.order_search import OrderSearch
from moe_pipeline.schedules.table.checker import check
from moe_pipeline.schedules.table.costs import StageCosts
from moe_pipeline.schedules.table.schedule import Action, Schedule, add_transfers
from moe_pipeline.schedules.table.simulator import simulate


def random_costs(random, stages):
    return [
        StageCosts(
            forward_s=random.uniform(0.5, 2),
            input_gradient_s=random.uniform(0.5, 2),
            weight_gradient_s=random.uniform(0.2, 2),
            forward_transfer_s=random.uniform(0, 0.3),
            backward_transfer_s=random.uniform(0, 0.3),
            activation_bytes=random.randint(5, 20),
            weight_gradient_bytes=random.randint(0, 5),
        )
        for _ in range(stages)
    ]


def searched(schedule, costs, *, seed=0, tries=300):
    cap = max(simulate(schedule, costs).peak_bytes)
    search = OrderSearch(schedule, costs, memory_cap_bytes=cap)
    rows = search.run(tries=tries, threshold=0.02, seed=seed).rows
    found = add_transfers(replace(schedule, ranks=tuple(map(tuple, rows))), costs)
    return found, cap


@pytest.mark.parametrize("name", ["zbv", "interleaved_1f1b", "interleaved_zero_bubble", "1f1b"])
def test_a_found_order_is_legal_fits_and_is_never_slower(name, seed):
    random = Random(seed)
    start = SCHEDULES[name](random.randint(2, 4), random.randint(1, 8))
    costs = random_costs(random, start.num_stages)
    found, cap = searched(start, costs, seed=seed)
    assert check(found) == []
    assert max(simulate(found, costs).peak_bytes) <= cap
    assert simulate(found, costs).makespan_s <= simulate(start, costs).makespan_s + 1e-9
    assert found.places() == start.places()


def test_what_another_rank_waits_for_goes_first():
    rows = ("0F0 0I0 0W0 0F1 0I1 0W1", "1F0 1I0 1W0 1F1 1I1 1W1")
    actions = (tuple(Action.parse(text) for text in row.split()) for row in rows)
    start = add_transfers(
        Schedule(name="x", num_stages=2, num_microbatches=2, ranks=tuple(actions))
    )
    found, _ = searched(start, [StageCosts(activation_bytes=0)] * 2)
    assert simulate(start).makespan_s == 10
    assert simulate(found).makespan_s == 7


def test_the_same_seed_finds_the_same_order():
    costs = random_costs(Random(1), 6)
    start = SCHEDULES["zbv"](3, 4)
    assert searched(start, costs, seed=3) == searched(start, costs, seed=3)


def test_a_schedule_that_waits_for_ever_is_refused():
    row = (Action.parse("1F0"), Action.parse("0F0"))
    stuck = Schedule(name="stuck", num_stages=2, num_microbatches=1, ranks=(row,))
    search = OrderSearch(stuck, [StageCosts()] * 2, memory_cap_bytes=9)
    with pytest.raises(ScheduleError, match="waits for ever"):
        search.run(tries=1, threshold=0.0, seed=0)
