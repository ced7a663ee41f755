import random
from dataclasses import replace

import pytest

from moe_pipeline.schedules.generators.catalog import SCHEDULES
from moe_pipeline.schedules.table.checker import check
from moe_pipeline.schedules.table.schedule import COMPUTE
from moe_pipeline.schedules.table.simulator import simulate

ALWAYS = [(1, 1), (1, 4), (2, 1), (3, 2), (4, 8), (5, 7), (8, 3), (8, 32)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_passes_the_checker_with_one_send_buffer(name, seed):
    """All sizes up to 8 x 32 are benchmarks/moe_pipeline_schedules.py."""
    draw = random.Random(seed)
    sizes = ALWAYS + [(draw.randint(1, 8), draw.randint(1, 32)) for _ in range(6)]
    for size in sizes:
        schedule = SCHEDULES[name](*size)
        assert check(schedule, send_buffers=1) == [], size
        found = simulate(schedule)
        assert sum(map(len, found.spans)) > 0
        assert schedule.num_microbatches == size[1]
        assert len(schedule.ranks) == size[0]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_refuses_sizes_below_one(name):
    with pytest.raises(ValueError, match="must be at least 1, got 0"):
        SCHEDULES[name](0, 3)
    with pytest.raises(ValueError, match="num_microbatches must be at least 1, got -1"):
        SCHEDULES[name](3, -1)


@pytest.mark.parametrize("name", SCHEDULES)
def test_receives_are_timed_as_if_messages_came_at_once(name):
    """The sends and receives in the table cost no time against the same without them."""
    schedule = SCHEDULES[name](4, 6)
    bare = [tuple(a for a in row if a.kind in COMPUTE) for row in schedule.ranks]
    assert simulate(schedule).spans == simulate(replace(schedule, ranks=tuple(bare))).spans
