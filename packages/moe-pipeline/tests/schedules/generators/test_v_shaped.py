import pytest

from moe_pipeline.executor.execution_plan import stage_holders
from moe_pipeline.schedules.generators.rows import folded_rank
from moe_pipeline.schedules.generators.v_shaped import v_half, v_min, zbv
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
