import pytest

from moe_pipeline.schedules.generators.interleaved import interleaved_1f1b
from moe_pipeline.schedules.generators.interleaved_zb import interleaved_zero_bubble
from moe_pipeline.schedules.table.schedule import Kind
from moe_pipeline.schedules.table.simulator import simulate


@pytest.mark.parametrize(("p", "m", "v"), [(2, 4, 2), (4, 8, 2), (4, 8, 3), (8, 16, 2)])
def test_it_is_faster_than_with_whole_backwards_for_little_more_memory(p, m, v):
    found = simulate(interleaved_zero_bubble(p, m, stages_per_rank=v))
    whole = simulate(interleaved_1f1b(p, m, stages_per_rank=v))
    assert found.makespan_s < whole.makespan_s
    for rank, (ours, theirs) in enumerate(zip(found.peak_bytes, whole.peak_bytes, strict=True)):
        assert theirs <= ours <= theirs + rank


@pytest.mark.parametrize(("p", "m", "v"), [(1, 3, 2), (3, 7, 2), (4, 2, 3)])
def test_input_gradients_keep_the_order_of_whole_backwards(p, m, v):
    found = interleaved_zero_bubble(p, m, stages_per_rank=v)
    whole = interleaved_1f1b(p, m, stages_per_rank=v)
    for ours, theirs in zip(found.ranks, whole.ranks, strict=True):
        order = [
            (a.stage, "F" if a.kind is Kind.FORWARD else "B", a.microbatch)
            for a in ours
            if a.kind in (Kind.FORWARD, Kind.INPUT_GRADIENT)
        ]
        assert order == [(a.stage, a.kind, a.microbatch) for a in theirs if a.kind in "FB"]


def test_sizes_below_one_are_refused():
    with pytest.raises(ValueError, match="stages_per_rank must be at least 1, got 0"):
        interleaved_zero_bubble(2, 4, stages_per_rank=0)
