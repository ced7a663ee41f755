import pytest

from moe_pipeline.executor.execution_plan import stage_holders
from moe_pipeline.schedules.generators.rows import folded_rank
from moe_pipeline.schedules.generators.v_shaped import v_half, v_min, zbv
from moe_pipeline.schedules.planner import plan
from moe_pipeline.schedules.table.costs import StageCosts
from moe_pipeline.schedules.table.simulator import simulate


@pytest.mark.parametrize("generate", [zbv, v_half, v_min])
def test_stages_lie_in_a_v(generate):
    for p in (1, 2, 5):
        holders = stage_holders(generate(p, 4))
        assert holders == {stage: (folded_rank(stage, p),) for stage in range(2 * p)}


@pytest.mark.parametrize("p", range(2, 9))
def test_memory_is_a_half_and_a_third_of_1f1b(p):
    m = 4 * p
    assert max(simulate(zbv(p, m)).peak_bytes) / 2 <= p
    assert max(simulate(v_half(p, m)).peak_bytes) / 2 <= (p + 3) / 2
    assert max(simulate(v_min(p, m)).peak_bytes) / 2 <= (p + 5) / 3


@pytest.mark.parametrize("p", range(1, 9))
def test_ranks_of_zbv_never_pause(p):
    for m in (2 * p - 1, 2 * p, 4 * p):
        found = simulate(zbv(p, m))
        assert max(found.inner_idle_s) == 0
        assert found.makespan_s == 6 * m + p - 1


@pytest.mark.parametrize(("p", "m"), [(2, 1), (2, 2), (3, 2), (3, 3), (3, 4), (4, 4)])
def test_zbv_of_few_microbatches_is_as_fast_as_what_a_search_finds(p, m):
    """At equal costs; the searched ones are the lengths of arXiv 2401.10241's heuristic too."""
    found = simulate(zbv(p, m))
    planned = simulate(plan(StageCosts(), p, m, memory_cap_bytes=2 * p, folded=True))
    assert found.makespan_s <= planned.makespan_s
    assert max(found.peak_bytes) <= 2 * p
