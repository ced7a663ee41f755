import pytest

from moe_pipeline.schedules.generators.basic import (
    forward_only,
    forward_then_backward,
    one_f_one_b,
)
from moe_pipeline.schedules.table.checker import check
from moe_pipeline.schedules.table.schedule import COMPUTE, Kind

GENERATORS = {
    "forward_then_backward": forward_then_backward,
    "1f1b": one_f_one_b,
    "forward_only": forward_only,
}
SIZES = [(p, m) for p in range(1, 9) for m in (1, 2, 3, 5, 8, 12)]


def computations(schedule, rank):
    short = {Kind.FORWARD: "F", Kind.BACKWARD: "B"}
    row = (a for a in schedule.ranks[rank] if a.kind in COMPUTE)
    return " ".join(f"{short[a.kind]}{a.microbatch}" for a in row)


def most_alive(schedule, rank):
    alive, most = 0, 0
    for action in schedule.ranks[rank]:
        alive += {Kind.FORWARD: 1, Kind.BACKWARD: -1}.get(action.kind, 0)
        most = max(most, alive)
    return most


@pytest.mark.parametrize("name", GENERATORS)
def test_every_size_passes_the_checker(name):
    for stages, microbatches in SIZES:
        assert check(GENERATORS[name](stages, microbatches)) == []


@pytest.mark.parametrize("generate", [forward_then_backward, forward_only])
def test_schedules_without_alternation_need_no_send_buffer(generate):
    for stages, microbatches in SIZES:
        assert check(generate(stages, microbatches), send_buffers=0) == []


def test_1f1b_needs_no_send_buffer_between_two_ranks():
    """Its receives stand in the order in which the peer sends, beside this rank's own sends."""
    assert check(one_f_one_b(2, 4), send_buffers=0) == []


def test_1f1b_is_that_of_the_paper():
    schedule = one_f_one_b(4, 5)
    assert computations(schedule, 0) == "F0 F1 F2 F3 B0 F4 B1 B2 B3 B4"
    assert computations(schedule, 2) == "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4"
    assert computations(schedule, 3) == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4"


def test_1f1b_holds_one_activation_per_stage_that_follows():
    for stages, microbatches in SIZES:
        schedule = one_f_one_b(stages, microbatches)
        for stage in range(stages):
            assert most_alive(schedule, stage) == min(stages - stage, microbatches)


def test_forward_then_backward_is_that_of_the_paper():
    schedule = forward_then_backward(2, 3)
    assert computations(schedule, 1) == "F0 F1 F2 B0 B1 B2"


def test_forward_only_has_no_backward():
    schedule = forward_only(2, 3)
    assert not schedule.has_backward
    assert computations(schedule, 0) == "F0 F1 F2"


@pytest.mark.parametrize("name", GENERATORS)
def test_sizes_below_one_are_refused(name):
    with pytest.raises(ValueError, match="num_stages must be at least 1, got 0"):
        GENERATORS[name](0, 3)
    with pytest.raises(ValueError, match="num_microbatches must be at least 1, got -1"):
        GENERATORS[name](3, -1)
