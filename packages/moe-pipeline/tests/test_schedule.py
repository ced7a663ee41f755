import pytest

from moe_pipeline.errors import ScheduleError
from moe_pipeline.schedule import Action, Kind, Schedule, add_transfers


@pytest.mark.parametrize("text", ["2F0", "1B3", "0SEND_F1", "1RECV_F1", "12SEND_B10", "0RECV_B7"])
def test_action_text_round_trips(text):
    assert str(Action.parse(text)) == text


def test_action_text_is_read_field_by_field():
    assert Action.parse(" 3SEND_B12 ") == Action(3, Kind.SEND_BACKWARD, 12)


@pytest.mark.parametrize("text", ["", "F", "2F", "F0", "2X0", "2f0", "2F0F", "-1F0", "2SEND0"])
def test_text_that_is_no_action_is_refused(text):
    with pytest.raises(ScheduleError, match="is not an action; expected <stage><kind><microbatch>"):
        Action.parse(text)


def compute_only(*rows, stages):
    ranks = tuple(tuple(map(Action.parse, row.split())) for row in rows)
    return Schedule(name="t", num_stages=stages, num_microbatches=1, ranks=ranks)


def text_of(schedule):
    return [" ".join(map(str, actions)) for actions in schedule.ranks]


def test_transfers_surround_the_computations():
    schedule = add_transfers(compute_only("0F0 0B0", "1F0 1B0", stages=2))
    assert text_of(schedule) == ["0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"]


def test_stages_on_one_rank_exchange_nothing():
    schedule = add_transfers(compute_only("0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0", stages=4))
    assert text_of(schedule) == [
        "0F0 0SEND_F0 3RECV_F0 3F0 3B0 3SEND_B0 0RECV_B0 0B0",
        "1RECV_F0 1F0 2F0 2SEND_F0 2RECV_B0 2B0 1B0 1SEND_B0",
    ]


def test_transfers_are_not_added_twice():
    with pytest.raises(ScheduleError, match="has sends or receives already"):
        add_transfers(add_transfers(compute_only("0F0 0B0", "1F0 1B0", stages=2)))
