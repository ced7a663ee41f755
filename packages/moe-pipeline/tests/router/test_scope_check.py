from dataclasses import replace

import pytest

from moe_pipeline.config import AUX_LOSS_SCOPES
from moe_pipeline.router.scope_check import check_aux_scope
from moe_pipeline.schedules.generators.basic import forward_only, forward_then_backward, one_f_one_b
from moe_pipeline.schedules.table.schedule import COMPUTE, Action, Kind, Schedule

GENERATORS = (forward_then_backward, one_f_one_b, forward_only)
SIZES = [(p, m) for p in range(1, 7) for m in (1, 2, 3, 4, 8)]


def is_accepted(schedule, scope="global_batch"):
    try:
        check_aux_scope(schedule, scope)
    except ValueError:
        return False
    return True


def load_is_known_to_every_backward(schedule):
    """Plays the schedule: a backward may use the load once all forwards of its stage have run."""
    for actions in schedule.ranks:
        forwards = dict.fromkeys(range(schedule.num_stages), 0)
        for action in actions:
            if action.kind is Kind.FORWARD:
                forwards[action.stage] += 1
            elif action.kind in COMPUTE and forwards[action.stage] < schedule.num_microbatches:
                return False
    return True


@pytest.mark.parametrize("generate", GENERATORS)
def test_global_batch_accepts_what_knows_the_load_in_time(generate):
    for stages, microbatches in SIZES:
        schedule = generate(stages, microbatches)
        assert is_accepted(schedule) == load_is_known_to_every_backward(schedule)


def test_global_batch_accepts_forward_then_backward_and_one_microbatch_alone():
    for stages, microbatches in SIZES:
        assert is_accepted(forward_then_backward(stages, microbatches))
        assert is_accepted(forward_only(stages, microbatches))
        assert is_accepted(one_f_one_b(stages, microbatches)) == (microbatches == 1)


@pytest.mark.parametrize("scope", [s for s in AUX_LOSS_SCOPES if s != "global_batch"])
@pytest.mark.parametrize("generate", GENERATORS)
def test_other_scopes_accept_every_schedule(generate, scope):
    for stages, microbatches in SIZES:
        assert is_accepted(generate(stages, microbatches), scope)


def test_one_early_backward_on_one_stage_is_found():
    schedule = forward_then_backward(3, 4)
    middle = list(schedule.ranks[1])
    last_forward, first_backward = Action(1, Kind.FORWARD, 3), Action(1, Kind.BACKWARD, 0)
    middle.remove(first_backward)
    middle.insert(middle.index(last_forward), first_backward)
    moved = replace(schedule, ranks=(schedule.ranks[0], tuple(middle), schedule.ranks[2]))
    with pytest.raises(ValueError, match=r"runs 1B0 before 1F3; choose forward_then_backward"):
        check_aux_scope(moved, "global_batch")


@pytest.mark.parametrize(
    ("text", "accepted"),
    [
        ("0F0 0F1 1F0 1F1 1B0 0B0 1B1 0B1", True),
        ("0F0 0F1 1F0 1B0 1F1 0B0 1B1 0B1", False),
    ],
)
def test_stages_of_one_rank_are_judged_one_by_one(text, accepted):
    actions = tuple(map(Action.parse, text.split()))
    schedule = Schedule(name="two on one", num_stages=2, num_microbatches=2, ranks=(actions,))
    assert is_accepted(schedule) == accepted
    assert load_is_known_to_every_backward(schedule) == accepted


@pytest.mark.parametrize("kind", sorted(COMPUTE - {Kind.FORWARD}))
def test_each_kind_of_backward_counts(kind):
    texts = {True: f"0F0 0F1 0{kind}0 0{kind}1", False: f"0F0 0{kind}0 0F1 0{kind}1"}
    for accepted, text in texts.items():
        actions = tuple(map(Action.parse, text.split()))
        schedule = Schedule(name=kind, num_stages=1, num_microbatches=2, ranks=(actions,))
        assert is_accepted(schedule) == accepted


def test_a_stage_that_two_ranks_share_is_refused():
    ranks = tuple(tuple(map(Action.parse, t.split())) for t in ("0F0 0B0", "0F1 0B1"))
    schedule = Schedule(name="both ways", num_stages=1, num_microbatches=2, ranks=ranks)
    assert not load_is_known_to_every_backward(schedule)
    with pytest.raises(ValueError, match="runs stage 0 on ranks 0 and 1"):
        check_aux_scope(schedule, "global_batch")
    check_aux_scope(schedule, "microbatch")


def test_the_message_names_schedule_size_and_remedy():
    with pytest.raises(ValueError, match=r"1f1b with 8 microbatches runs 0B0 before 0F4"):
        check_aux_scope(one_f_one_b(4, 8), "global_batch")


def test_an_unknown_scope_is_refused():
    with pytest.raises(ValueError, match="'batch' is unknown; choose one of microbatch"):
        check_aux_scope(one_f_one_b(1, 1), "batch")
