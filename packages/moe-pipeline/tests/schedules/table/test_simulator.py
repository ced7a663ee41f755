"""Figures of the papers, in slots of T_F = T_I = T_W = 1 per stage of the schedule."""

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from moe_pipeline.errors import ScheduleError
from moe_pipeline.schedules.generators.basic import forward_only, one_f_one_b
from moe_pipeline.schedules.generators.catalog import SCHEDULES
from moe_pipeline.schedules.table.costs import StageCosts
from moe_pipeline.schedules.table.schedule import COMPUTE, Action, Schedule
from moe_pipeline.schedules.table.simulator import Simulation, simulate


@pytest.mark.parametrize(
    ("name", "stages_per_rank", "slots", "activations"),
    [
        ("forward_then_backward", 1, 69, 16),
        ("1f1b", 1, 69, 8),
        ("interleaved_1f1b", 2, 117, 11.5),
        ("looped_bfs", 2, 117, 16),
        ("interleaved_forward_then_backward", 2, 117, 12),
        ("zb_1p", 1, 55, 8),
        ("zb_2p", 1, 55, 15),
        ("zbv", 2, 103, 8),
        ("v_half", 2, 113, 5),
        ("v_min", 2, 123, 4),
        ("dualpipe", 1, 54, 9),
        ("dualpipe_v", 2, 110, 8.5),
    ],
)
def test_time_and_memory_are_those_of_the_papers(name, stages_per_rank, slots, activations):
    """8 ranks, 16 microbatches; the peak in activations of a whole rank."""
    found = simulate(SCHEDULES[name](8, 16), pair_saving_s=0.0)
    assert found.makespan_s == slots
    assert max(found.peak_bytes) == activations * stages_per_rank


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (8, 16), (8, 32), (6, 12)])
def test_bubbles_follow_the_papers_formulas(p, m):
    f, i, w = 1, 1, 1
    assert max(simulate(SCHEDULES["1f1b"](p, m)).inner_idle_s) == (p - 1) * (f + i + w)
    assert max(simulate(SCHEDULES["zb_1p"](p, m)).inner_idle_s) == (p - 1) * (f + i - w)
    assert max(simulate(SCHEDULES["zb_2p"](p, m)).inner_idle_s) == (p - 1) * (f + i - 2 * w)
    assert max(simulate(SCHEDULES["zbv"](p, m)).inner_idle_s) == 0
    pair = simulate(SCHEDULES["dualpipe"](p, m), pair_saving_s=0.0)
    assert max(pair.inner_idle_s) == (p // 2 - 1) * (f + i + w + i + w - 3 * w)
    pair = simulate(SCHEDULES["dualpipe_v"](p, m), pair_saving_s=0.0)
    assert max(pair.inner_idle_s) == (p - 1) * (f + i + w + i + w - 3 * w)


def longest_path(schedule, costs):
    """Oracle: start times relaxed until nothing changes, over computations only."""
    places = schedule.places()
    rows = [[a for a in row if a.kind in COMPUTE] for row in schedule.ranks]
    took = {"F": lambda c: c.forward_s, "I": lambda c: c.input_gradient_s}
    took["W"] = lambda c: c.weight_gradient_s
    took["B"] = lambda c: c.input_gradient_s + c.weight_gradient_s
    makers = {
        (a.stage, a.kind.value in "BI", a.microbatch): a for r in rows for a in r if a.kind != "W"
    }
    edges = [(a, b, 0.0) for row in rows for a, b in pairwise(row)]
    for b in (b for row in rows for b in row):
        back = b.kind.value in "BI"
        needs = [(b.stage + (1 if back else -1), back)] if b.kind != "W" else [(b.stage, True)]
        for stage, way in needs + [(b.stage, False)] * back:
            a = makers.get((stage, way, b.microbatch))
            if a is not None:
                far = places[a.stage, a.microbatch] != places[b.stage, b.microbatch]
                c = costs[a.stage]
                edges.append((a, b, far * (c.backward_transfer_s if way else c.forward_transfer_s)))
    start = {b: 0.0 for row in rows for b in row}
    changed = True
    while changed:
        changed = False
        for a, b, travel in edges:
            least = start[a] + took[a.kind.value](costs[a.stage]) + travel
            if least > start[b] + 1e-9:
                start[b], changed = least, True
    return start


@pytest.mark.parametrize("name", SCHEDULES)
def test_times_under_unequal_costs_are_the_longest_paths(name, seed):
    rng = Random(seed)
    schedule = SCHEDULES[name](3, 4)
    # Without transfers in the table: a message travels when it is made.
    bare = [tuple(a for a in row if a.kind in COMPUTE) for row in schedule.ranks]
    schedule = replace(schedule, ranks=tuple(bare))
    costs = [
        StageCosts(
            forward_s=rng.uniform(0.5, 2),
            input_gradient_s=rng.uniform(0.5, 2),
            weight_gradient_s=rng.uniform(0.5, 2),
            forward_transfer_s=rng.uniform(0, 1),
            backward_transfer_s=rng.uniform(0, 1),
        )
        for _ in range(schedule.num_stages)
    ]
    found = simulate(schedule, costs)
    starts = longest_path(schedule, costs)
    for row in found.spans:
        for span in row:
            assert span.start_s == pytest.approx(starts[span.action])


def test_weight_gradients_keep_what_they_need():
    rows = (tuple(map(Action.parse, ["0F0", "0I0", "0F1", "0I1", "0W0", "0W1"])),)
    schedule = Schedule(name="t", num_stages=1, num_microbatches=2, ranks=rows)
    assert simulate(schedule, StageCosts(activation_bytes=10)).peak_bytes == (20,)
    part = StageCosts(activation_bytes=10, weight_gradient_bytes=4)
    assert simulate(schedule, part).peak_bytes == (14,)
    assert simulate(schedule, part).stage_peak_bytes == (14,)


def test_a_pair_counts_once_and_saves_what_is_said():
    schedule = SCHEDULES["dualpipe_v"](2, 8)
    turns = simulate(schedule)
    together = simulate(schedule, pair_saving_s=1.0)
    assert sum(turns.busy_s) - sum(together.busy_s) == len(schedule.paired)
    assert together.makespan_s < turns.makespan_s


def test_nothing_is_held_without_backward():
    assert simulate(forward_only(3, 4)).peak_bytes == (0, 0, 0)


def test_bubble_is_the_idle_share():
    assert simulate(one_f_one_b(4, 8)).bubble == pytest.approx(3 / 11)


def test_a_schedule_that_waits_for_ever_is_named():
    rows = (tuple(map(Action.parse, ["0B0", "0F0"])),)
    with pytest.raises(ScheduleError, match="schedule t cannot run: 0B0 wait for ever"):
        simulate(Schedule(name="t", num_stages=1, num_microbatches=1, ranks=rows))


@pytest.mark.parametrize("name", SCHEDULES)
def test_costs_are_those_that_a_schedule_was_simulated_with(name):
    schedule = SCHEDULES[name](4, 8)
    costs = [
        StageCosts(forward_s=1 + stage, input_gradient_s=2 + stage, weight_gradient_s=3 + stage)
        for stage in range(schedule.num_stages)
    ]
    for stage, found in enumerate(Simulation.measured(simulate(schedule, costs).spans).costs()):
        assert found.forward_s == pytest.approx(1 + stage)
        if schedule.has_backward:
            assert found.input_gradient_s + found.weight_gradient_s == pytest.approx(5 + 2 * stage)
