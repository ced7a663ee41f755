from dataclasses import replace

import pytest

from moe_pipeline.errors import ScheduleError
from moe_pipeline.schedules.generators.basic import forward_only, forward_then_backward, one_f_one_b
from moe_pipeline.schedules.table.schedule import Action, Schedule
from moe_pipeline.schedules.views.picture import format_schedule


def test_picture_of_1f1b():
    assert format_schedule(one_f_one_b(2, 3)).splitlines() == [
        "1f1b: 2 stages, 3 microbatches, 12 slots (F 1, B 2), idle 25.0 %",
        "rank 0 | F0 F1  .  . B0  - F2 B1  -  . B2  -",
        "rank 1 |  . F0 B0  - F1 B1  - F2 B2  -  .  .",
    ]


def test_picture_of_forwards_only():
    assert format_schedule(forward_only(2, 2)).splitlines()[1:] == [
        "rank 0 | F0 F1  .",
        "rank 1 |  . F0 F1",
    ]


@pytest.mark.parametrize("generate", [forward_then_backward, one_f_one_b])
def test_idle_share_is_the_bubble_of_the_papers(generate):
    for stages, microbatches in [(2, 2), (4, 8), (8, 16)]:
        head = format_schedule(generate(stages, microbatches)).splitlines()[0]
        share = 100 * (stages - 1) / (microbatches + stages - 1)
        assert head.endswith(f"idle {share:.1f} %")


def test_several_stages_on_a_rank_are_told_apart():
    rows = ["0F0 1F0 1B0 0B0"]
    ranks = tuple(tuple(map(Action.parse, row.split())) for row in rows)
    schedule = Schedule(name="t", num_stages=2, num_microbatches=1, ranks=ranks)
    assert format_schedule(schedule).splitlines()[1] == "rank 0 | 0F0 1F0 1B0   - 0B0   -"


def test_a_schedule_that_cannot_run_cannot_be_drawn():
    schedule = one_f_one_b(2, 2)
    rows = (schedule.ranks[0], tuple(a for a in schedule.ranks[1] if str(a) != "1B0"))
    with pytest.raises(ScheduleError, match="cannot run: 0B0 wait for ever"):
        format_schedule(replace(schedule, ranks=rows))
