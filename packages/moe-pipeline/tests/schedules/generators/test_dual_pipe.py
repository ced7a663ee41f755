from itertools import pairwise

import pytest

from moe_pipeline.schedules.generators.dual_pipe import dualpipe, dualpipe_v
from moe_pipeline.schedules.table.schedule import COMPUTE, Kind
from moe_pipeline.schedules.table.simulator import simulate


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 9), (5, 10), (3, 2), (4, 1)])
def test_microbatches_enter_from_both_ends(p, m):
    schedule = dualpipe(p, m)
    places = schedule.places()
    first = (m + 1) // 2
    for (stage, microbatch), rank in places.items():
        assert rank == (stage if microbatch < first else p - 1 - stage)


@pytest.mark.parametrize("p", [2, 3, 4, 6, 8])
def test_one_activation_more_than_1f1b(p):
    even = p + p % 2
    assert max(simulate(dualpipe(p, 4 * p)).peak_bytes) == even + 1
    assert max(simulate(dualpipe_v(p, 4 * p)).peak_bytes) == 2 * p + 1


@pytest.mark.parametrize("generate", [dualpipe, dualpipe_v])
def test_a_backward_of_another_microbatch_follows_a_paired_forward(generate):
    schedule = generate(4, 12)
    assert schedule.paired
    for row in schedule.ranks:
        work = [a for a in row if a.kind in COMPUTE]
        for forward, after in pairwise(work):
            if forward in schedule.paired:
                assert forward.kind is Kind.FORWARD
                assert after.kind is Kind.BACKWARD
                assert after.microbatch != forward.microbatch
