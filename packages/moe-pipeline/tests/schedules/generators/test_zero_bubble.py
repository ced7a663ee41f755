import pytest

from moe_pipeline.schedules.generators.zero_bubble import zb_1p, zb_2p
from moe_pipeline.schedules.table.schedule import COMPUTE
from moe_pipeline.schedules.table.simulator import simulate


def computations(schedule, rank):
    row = (a for a in schedule.ranks[rank] if a.kind in COMPUTE)
    return " ".join(f"{a.kind.value}{a.microbatch}" for a in row)


def test_the_first_rank_alternates_and_the_last_puts_w_off():
    schedule = zb_1p(2, 4)
    assert computations(schedule, 0) == "F0 F1 I0 W0 F2 I1 W1 F3 I2 W2 I3 W3"
    assert computations(schedule, 1) == "F0 I0 W0 F1 I1 W1 F2 I2 F3 I3 W2 W3"


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 8), (4, 3), (4, 12), (8, 32)])
def test_memory_is_what_the_names_say(p, m):
    assert max(simulate(zb_1p(p, m)).peak_bytes) == min(p, m)
    assert max(simulate(zb_2p(p, m)).peak_bytes) == min(2 * p - 1, m)


@pytest.mark.parametrize("p", [2, 3, 5, 8])
def test_no_rank_of_zb_2p_pauses_from_2p_minus_1_microbatches_on(p):
    for m in (2 * p - 1, 2 * p, 4 * p + 1):
        assert set(simulate(zb_2p(p, m)).inner_idle_s) == {0.0}
