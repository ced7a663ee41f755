import pytest

from moe_pipeline.schedules.generators.interleaved import (
    interleaved_1f1b,
    interleaved_forward_only,
    interleaved_forward_then_backward,
    looped_bfs,
)
from moe_pipeline.schedules.table.checker import check
from moe_pipeline.schedules.table.schedule import COMPUTE
from moe_pipeline.schedules.table.simulator import simulate


def computations(schedule, rank):
    return " ".join(str(a) for a in schedule.ranks[rank] if a.kind in COMPUTE)


def test_interleaved_1f1b_is_that_of_the_paper():
    schedule = interleaved_1f1b(2, 4)
    assert computations(schedule, 0) == (
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3"
    )
    assert computations(schedule, 1) == (
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3"
    )


def test_looped_bfs_is_that_of_the_paper():
    schedule = looped_bfs(2, 2)
    assert computations(schedule, 1) == "1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0"


def test_backwards_begin_with_the_last_stage_in_balanced_memory():
    schedule = interleaved_forward_then_backward(2, 3)
    assert computations(schedule, 1) == "1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1B0 1B1 1B2"


@pytest.mark.parametrize(("p", "m", "v"), [(4, 8, 2), (4, 12, 3), (8, 16, 2)])
def test_balanced_memory_holds_less_than_breadth_first(p, m, v):
    peaks = simulate(interleaved_forward_then_backward(p, m, stages_per_rank=v)).peak_bytes
    assert max(peaks) == m * (v - 1) + p
    assert max(simulate(looped_bfs(p, m, stages_per_rank=v)).peak_bytes) == m * v


@pytest.mark.parametrize("v", [2, 3, 4])
def test_the_fill_is_as_many_times_shorter_as_stages_are_on_a_rank(v):
    p, m = 4, 8
    assert max(simulate(interleaved_1f1b(p, m, stages_per_rank=v)).inner_idle_s) == 3 * (p - 1)
    assert simulate(interleaved_1f1b(p, m, stages_per_rank=v)).makespan_s == 3 * (m * v + p - 1)


@pytest.mark.parametrize(
    "generate",
    [interleaved_1f1b, looped_bfs, interleaved_forward_then_backward, interleaved_forward_only],
)
@pytest.mark.parametrize("v", [1, 3])
def test_any_number_of_microbatches_and_stages_is_legal(generate, v):
    for p, m in [(1, 3), (2, 5), (3, 1), (4, 6), (3, 7)]:
        assert check(generate(p, m, stages_per_rank=v)) == []
    with pytest.raises(ValueError, match="stages_per_rank must be at least 1, got 0"):
        generate(2, 2, stages_per_rank=0)
    with pytest.raises(TypeError, match="num_microbatches must be an int, got '2'"):
        generate(2, "2", stages_per_rank=v)
