import pytest

from moe_pipeline.schedules.generators.building_block import rows_of_block
from moe_pipeline.schedules.generators.rows import finish
from moe_pipeline.schedules.table.checker import check
from moe_pipeline.schedules.table.simulator import simulate


def schedule_of(p, m, **kwargs):
    blocks = [(r, 2 * p - 1 - r, 2 * p + r, 4 * p - 1 - r) for r in range(p)]
    return finish("t", rows_of_block(blocks, m, **kwargs), m, num_stages=2 * p)


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 5), (4, 3), (5, 9)])
def test_a_block_becomes_a_legal_schedule(p, m):
    assert check(schedule_of(p, m)) == []


def test_a_longer_period_holds_less_and_takes_longer():
    tight, loose = simulate(schedule_of(7, 12)), simulate(schedule_of(7, 12, period=10))
    assert max(loose.peak_bytes) < max(tight.peak_bytes)
    assert loose.makespan_s > tight.makespan_s


def test_a_limit_is_used_and_kept():
    least = simulate(schedule_of(7, 12))
    more = simulate(schedule_of(7, 12, limit=10))
    assert max(least.peak_bytes) < max(more.peak_bytes) <= 10
    assert more.makespan_s <= least.makespan_s
