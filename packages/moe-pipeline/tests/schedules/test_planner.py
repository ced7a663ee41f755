"""The exact solver steps through slots and keeps every state that can still end early enough.

All computations take a slot and stages are alike, so a state is how many F and I each stage and how
many W each rank has done. It shares nothing with the planner or the simulator.
"""

from itertools import product
from random import Random

import pytest

from moe_pipeline.schedules.generators.catalog import SCHEDULES
from moe_pipeline.schedules.planner import plan
from moe_pipeline.schedules.table.checker import check
from moe_pipeline.schedules.table.costs import StageCosts
from moe_pipeline.schedules.table.simulator import simulate


def can_end_by(p, m, cap, slots):
    """Whether any schedule in a V of `p` ranks with at most `cap` activations ends in `slots`."""
    frontier = {(0,) * (5 * p)}
    for now in range(slots):
        following = set()
        for state in frontier:
            for choice in product(*(options(state, p, m, cap, rank) for rank in range(p))):
                changed = list(state)
                for index in choice:
                    if index is not None:
                        changed[index] += 1
                if now + 1 + least_left(changed, p, m) <= slots:
                    following.add(tuple(changed))
        frontier = following
    return bool(frontier)


def options(state, p, m, cap, rank):
    """Indices into the state that `rank` may raise by one in this slot."""
    stages = 2 * p
    f, i, w = state[:stages], state[stages : 2 * stages], state[2 * stages :]
    up = stages - 1 - rank
    found = [None]
    for s in (up, rank):
        if i[s] < f[s] and (s == stages - 1 or i[s] < i[s + 1]):
            found.append(stages + s)
        if f[s] < m and (s == 0 or f[s] < f[s - 1]) and f[rank] + f[up] - w[rank] < cap:
            found.append(s)
    if w[rank] < i[rank] + i[up]:
        found.append(2 * stages + rank)
    return found


def least_left(state, p, m):
    """Slots that are needed at least: each rank's work, and the last microbatch's way."""
    stages = 2 * p
    f, i, w = state[:stages], state[stages : 2 * stages], state[2 * stages :]
    work = [6 * m - f[r] - f[-1 - r] - i[r] - i[stages - 1 - r] - w[r] for r in range(p)]
    way = sum(count < m for count in f) + sum(count < m for count in i)
    return max(*work, way + (i[0] < m), 0) if p > 1 else max(work[0], way + (i[0] < m))


def span_of(schedule, costs=None):
    return simulate(schedule, costs).makespan_s


@pytest.mark.parametrize(("p", "m"), list(product((1, 2, 3), (1, 2, 3, 4))))
def test_no_schedule_of_a_small_pipeline_is_faster(p, m):
    for cap in range(2, 2 * m + 1):
        slots = int(span_of(plan(StageCosts(), p, m, cap)))
        assert can_end_by(p, m, cap, slots)
        assert not can_end_by(p, m, cap, slots - 1), (p, m, cap, slots)


@pytest.mark.parametrize("activations", [3, 4, 5, 6.5, 7, 8, 9, 16])
def test_no_known_schedule_with_that_memory_is_faster(activations):
    cap = int(2 * activations)
    planned = plan(StageCosts(), 8, 16, cap)
    assert check(planned) == []
    assert max(simulate(planned).peak_bytes) <= cap
    for generate in SCHEDULES.values():
        known = generate(8, 16)
        share = known.num_stages // 8  # a stage of a schedule with one on each rank counts twice
        found = simulate(known, pair_saving_s=0.0)
        if known.has_backward and max(found.peak_bytes) * 2 <= cap * share:
            assert span_of(planned) * share <= found.makespan_s * 2


def test_plans_fit_and_are_legal_under_unequal_costs(seed):
    plans_hold(seed)


def test_receives_of_a_plan_do_not_make_it_slower_than_a_named_schedule():
    """Here the second plan lost 5% to receives that stood too early for these costs."""
    plans_hold(1156054720)


def plans_hold(seed):
    from_seed = Random(seed)
    for _ in range(3):
        p, m = from_seed.randint(1, 5), from_seed.randint(1, 9)
        costs = [
            StageCosts(
                forward_s=from_seed.uniform(0.5, 2),
                input_gradient_s=from_seed.uniform(0.5, 2),
                weight_gradient_s=from_seed.uniform(0.2, 2),
                forward_transfer_s=from_seed.uniform(0, 0.3),
                backward_transfer_s=from_seed.uniform(0, 0.3),
                activation_bytes=(size := from_seed.randint(5, 20)),
                weight_gradient_bytes=from_seed.randint(0, size),
            )
            for _ in range(2 * p)
        ]
        cap = from_seed.randint(40, 40 + 30 * m)
        planned = plan(costs, p, m, cap)
        assert check(planned) == []
        assert max(simulate(planned, costs).peak_bytes) <= cap
        for name in ("zbv", "v_half", "v_min"):
            found = simulate(SCHEDULES[name](p, m), costs)
            if max(found.peak_bytes) <= cap:
                assert span_of(planned, costs) <= found.makespan_s + 1e-9


def test_the_same_problem_gives_the_same_plan():
    assert plan(StageCosts(), 4, 6, 7) == plan(StageCosts(), 4, 6, 7)


def test_more_memory_is_never_slower():
    spans = [span_of(plan(StageCosts(), 3, 5, cap)) for cap in range(2, 9)]
    assert spans == sorted(spans, reverse=True)


def test_a_cap_below_one_microbatch_is_refused():
    with pytest.raises(ValueError, match="memory_cap_bytes=19 is less than the 20 bytes"):
        plan(StageCosts(activation_bytes=10), 2, 4, 19)


def test_costs_of_every_stage_are_wanted():
    with pytest.raises(ValueError, match="expected costs of 4 stages, got 2"):
        plan([StageCosts()] * 2, 2, 4, 19)


@pytest.mark.parametrize(("p", "m"), [(0, 1), (1, 0)])
def test_sizes_below_one_are_refused(p, m):
    with pytest.raises(ValueError, match="must be at least 1, got 0"):
        plan(StageCosts(), p, m, 10)
