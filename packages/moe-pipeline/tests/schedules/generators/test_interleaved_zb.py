import pytest

from moe_pipeline.schedules.generators.interleaved import interleaved_1f1b
from moe_pipeline.schedules.generators.interleaved_zb import interleaved_zero_bubble
from moe_pipeline.schedules.table.schedule import Kind
from moe_pipeline.schedules.table.simulator import simulate


@pytest.mark.parametrize(("p", "m", "v"), [(2, 4, 2), (4, 8, 2), (4, 8, 3), (8, 16, 2)])
def test_it_is_faster_than_with_whole_backwards_in_no_more_memory(p, m, v):
    found = simulate(interleaved_zero_bubble(p, m, stages_per_rank=v))
    whole = simulate(interleaved_1f1b(p, m, stages_per_rank=v))
    assert found.makespan_s < whole.makespan_s
    assert max(found.peak_bytes) <= max(whole.peak_bytes)


@pytest.mark.parametrize(("p", "m", "v"), [(1, 3, 2), (3, 7, 2), (4, 2, 3)])
def test_input_gradients_keep_the_order_of_whole_backwards(p, m, v):
    found = interleaved_zero_bubble(p, m, stages_per_rank=v)
    whole = interleaved_1f1b(p, m, stages_per_rank=v)
    for ours, theirs in zip(found.ranks, whole.ranks, strict=True):
        for mine, kind in ((Kind.FORWARD, "F"), (Kind.INPUT_GRADIENT, "B")):
            order = [(a.stage, a.microbatch) for a in ours if a.kind is mine]
            assert order == [(a.stage, a.microbatch) for a in theirs if a.kind == kind]


def test_sizes_below_one_are_refused():
    with pytest.raises(ValueError, match="stages_per_rank must be at least 1, got 0"):
        interleaved_zero_bubble(2, 4, stages_per_rank=0)
