import random

import pytest

from moe_pipeline.errors import ScheduleError
from moe_pipeline.schedules.generators.greedy import Policy, Task, run_policy
from moe_pipeline.schedules.table.checker import check
from moe_pipeline.schedules.table.costs import StageCosts
from moe_pipeline.schedules.table.schedule import Action, Kind, Schedule, add_transfers


@pytest.mark.parametrize(
    "text", ["2F0", "1B3", "1I3", "0W3", "0SEND_F1", "1RECV_F1", "12SEND_B10", "0RECV_B7"]
)
def test_action_text_round_trips(text):
    assert str(Action.parse(text)) == text


def test_action_text_is_read_field_by_field():
    assert Action.parse(" 3SEND_B12 ") == Action(3, Kind.SEND_BACKWARD, 12)


@pytest.mark.parametrize(
    "text", ["", "F", "2F", "F0", "2X0", "2f0", "2F0F", "-1F0", "2SEND0", "9" * 5000 + "F0"]
)
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


def test_a_message_that_would_fill_its_link_is_received_early():
    """Rank 1 sends two messages before rank 0 wants the first."""
    rows = ("0F0 0F1 0F2 0F3 2F0 2F1 2F2 2F3", "1F0 1F1 1F2 1F3 3F0 3F1 3F2 3F3")
    ranks = tuple(tuple(map(Action.parse, row.split())) for row in rows)
    bare = Schedule(name="t", num_stages=4, num_microbatches=4, ranks=ranks, has_backward=False)
    schedule = add_transfers(bare)
    row = text_of(schedule)[0].split()
    assert row.index("2RECV_F0") < row.index("0F3")
    assert check(schedule, send_buffers=1) == []


def test_any_legal_order_gets_transfers_that_need_one_buffer_or_none_in_pair_order(seed):
    """Random orders: each rank shuffles what it may do, one microbatch after another."""
    draw = random.Random(seed)
    for _ in range(20):
        p, m = draw.randint(2, 4), draw.randint(2, 5)
        policy = Policy(
            forward_at=tuple(draw.randint(0, 60) for _ in range(2 * p)),
            gradient_at=tuple(draw.randint(0, 60) for _ in range(2 * p)),
            in_flight=tuple(draw.randint(1, m) for _ in range(2 * p)),
            weight_delay=draw.choice((0, 1000)),
        )
        costs = [
            StageCosts(
                forward_s=draw.randint(0, 9),
                input_gradient_s=draw.randint(0, 3),
                forward_transfer_s=draw.choice((0, 0.5, 4)),
            )
            for _ in range(2 * p)
        ]
        task = Task(num_ranks=p, num_microbatches=m, costs=costs, memory_cap_bytes=100)
        rows = run_policy(task, policy).rows
        bare = Schedule(
            name="t",
            num_stages=2 * p,
            num_microbatches=m,
            ranks=tuple(map(tuple, rows)),
        )
        for schedule in (add_transfers(bare), add_transfers(bare, costs)):
            assert check(schedule, send_buffers=1) == []
            assert check(schedule, send_buffers=0) == []
            for edges, communicators in (("pair_fifo", 1), ("pair_fifo", 2), ("group_fifo", 1)):
                assert check(schedule, edges=edges, communicators=communicators) == []
