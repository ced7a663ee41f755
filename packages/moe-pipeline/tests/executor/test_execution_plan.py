import pytest

from moe_pipeline.executor.execution_plan import (
    RECEIVES,
    SENDS,
    Edge,
    ExecutionPlan,
    other_end,
    stage_holders,
)
from moe_pipeline.schedules.generators.basic import forward_then_backward, one_f_one_b
from moe_pipeline.schedules.generators.catalog import SCHEDULES
from moe_pipeline.schedules.table.schedule import Action


def test_the_peer_of_a_transfer_performs_the_opposite():
    assert str(other_end(Action.parse("2SEND_F1"))) == "3RECV_F1"
    assert str(other_end(Action.parse("2SEND_B1"))) == "1RECV_B1"
    for text in ("2SEND_F1", "3RECV_F1", "2SEND_B1", "1RECV_B1"):
        assert other_end(other_end(Action.parse(text))) == Action.parse(text)


def test_a_gradient_proves_that_all_forwards_arrived_in_forward_then_backward():
    table = ExecutionPlan.of(forward_then_backward(3, 6), 1)
    first = table.delivered[Action.parse("1RECV_B0")]
    assert first == {Edge(2, True): 6}
    assert table.expected[Edge(0, True)] == tuple(Action.parse(f"1RECV_F{m}") for m in range(6))
    assert table.targets == {Edge(0, False), Edge(2, True)}


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_delivered_never_counts_more_than_was_sent(name):
    """Follow all rows at once: what a receive proves has really been received by then."""
    schedule = SCHEDULES[name](4, 6)
    tables = [ExecutionPlan.of(schedule, rank) for rank in range(4)]
    at, received, sent, done = [0] * 4, {}, set(), 0
    while done < sum(map(len, schedule.ranks)):
        before = done
        for rank, row in enumerate(schedule.ranks):
            while at[rank] < len(row):
                action = row[at[rank]]
                if action.kind in RECEIVES:
                    if other_end(action) not in sent:
                        break
                    for edge, count in tables[rank].delivered[action].items():
                        assert received.get((rank, edge.peer, edge.forward), 0) >= count
                    edge = tables[rank].edges[action]
                    key = (edge.peer, rank, edge.forward)
                    received[key] = received.get(key, 0) + 1
                elif action.kind in SENDS:
                    sent.add(action)
                at[rank] += 1
                done += 1
        assert done > before


def test_holders_of_stages():
    assert stage_holders(one_f_one_b(3, 2)) == {0: (0,), 1: (1,), 2: (2,)}
    assert stage_holders(SCHEDULES["zbv"](2, 2)) == {0: (0,), 1: (1,), 2: (1,), 3: (0,)}
    assert stage_holders(SCHEDULES["dualpipe"](4, 8)) == {
        0: (0, 3),
        1: (1, 2),
        2: (1, 2),
        3: (0, 3),
    }
