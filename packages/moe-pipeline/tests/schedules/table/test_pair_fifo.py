"""The oracle writes what must precede what as one graph: a table is right when it has no cycle.

`PairRun` lets ranks run instead, so the two share no reasoning.
"""

import random
from collections import defaultdict
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise, product

import pytest

from moe_pipeline.schedules.generators.catalog import SCHEDULES
from moe_pipeline.schedules.table.checker import check
from moe_pipeline.schedules.table.pair_fifo import PairRun, Post
from moe_pipeline.schedules.table.schedule import Action, Kind, Schedule

STEPS = {
    Kind.SEND_FORWARD: 1,
    Kind.SEND_BACKWARD: -1,
    Kind.RECV_FORWARD: -1,
    Kind.RECV_BACKWARD: 1,
}
FORWARD = (Kind.SEND_FORWARD, Kind.RECV_FORWARD)
ORDERS = ("pair_fifo", "group_fifo")
SENDS = (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)


def message_of(action):
    """The same for a send and its receive."""
    to = action.stage + STEPS[action.kind] if action.kind in SENDS else action.stage
    return (action.kind in FORWARD, to, action.microbatch)


def is_ordered(schedule, communicators, *, edges="pair_fifo"):
    """Whether every rank ends when each send waits for its receive, in order for pair or group.

    Only for schedules that `check` accepts with links.
    """
    places, graph = schedule.places(), defaultdict(set)
    queues, sequences = defaultdict(list), defaultdict(list)
    for rank, row in enumerate(schedule.ranks):
        for i, action in enumerate(row):
            graph[rank, i] |= {(rank, i - 1)} if i else set()  # this one is passed
            if action.kind not in STEPS:
                continue
            peer = places[action.stage + STEPS[action.kind], action.microbatch]
            message = message_of(action)
            channel = communicators == 1 or action.kind in FORWARD
            queues[rank, -1 if edges == "group_fifo" else peer, channel].append(message)
            sends = action.kind in SENDS
            ends = (rank, peer) if sends else (peer, rank)
            sequences[(*ends, channel), sends].append(message)
            graph[message] |= {(rank, i - 1)} if i else set()  # posted
            graph[rank, i] |= set() if sends else {message}
    for queue in queues.values():
        for before, after in pairwise(queue):
            graph[after].add(before)
    if any(sequences[key, True] != sequences[key, False] for key, _ in list(sequences)):
        return False
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError:
        return False
    return True


def moved(schedule, draw):
    """Some receives of some ranks later, some other actions elsewhere."""
    rows = [list(row) for row in schedule.ranks]
    for _ in range(draw.randint(1, 9)):
        row = draw.choice(rows)
        at = draw.randrange(len(row))
        receives = row[at].kind in STEPS and row[at].kind not in SENDS
        step = draw.randint(1, 6) if receives else draw.choice((-1, 1))
        row.insert(min(len(row) - 1, max(0, at + step)), row.pop(at))
    return replace(schedule, ranks=tuple(map(tuple, rows)))


def judge(schedule, communicators, edges):
    """Whether the checker accepts it, having asked the oracle too."""
    problems = check(schedule, edges=edges, communicators=communicators)
    ordered = is_ordered(schedule, communicators, edges=edges)
    assert ordered == (problems == []), (schedule, communicators, edges, problems)
    return ordered


@pytest.mark.parametrize("name", SCHEDULES)
def test_named_schedules_pass_with_one_and_two_communicators_and_any_buffer(name):
    for ranks in (2, 3, 4, 8):
        schedule = SCHEDULES[name](ranks, ranks + 1)
        assert check(schedule, send_buffers=0) == []  # all in parts of one order
        for settings in product(ORDERS, (1, 2)):
            assert judge(schedule, settings[1], settings[0])
            for send_buffers in (1, 10**6):
                edges, communicators = settings
                assert not check(
                    schedule, edges=edges, communicators=communicators, send_buffers=send_buffers
                )


def test_moved_actions_are_judged_as_the_oracle_does(seed):
    draw, accepted, rejected = random.Random(seed), 0, 0
    for name in SCHEDULES:
        for _ in range(60):
            mutant = moved(SCHEDULES[name](draw.randint(2, 4), draw.randint(3, 6)), draw)
            if check(mutant):
                continue
            for edges, communicators in product(ORDERS, (1, 2)):
                if judge(mutant, communicators, edges):
                    accepted += 1
                    # Room only helps.
                    assert not check(
                        mutant, edges=edges, communicators=communicators, send_buffers=1
                    )
                else:
                    rejected += 1
    assert accepted > 20 and rejected > 2, (accepted, rejected)


def table(*rows):
    """Two stages, two microbatches."""
    ranks = tuple(tuple(map(Action.parse, row.split())) for row in rows)
    return Schedule(name="t", num_stages=2, num_microbatches=2, ranks=ranks)


# 1F1B as it was written when receives stood right before the computations that need them.
CROSSED = (
    "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
    "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
)


def test_1f1b_with_late_receives_needs_two_communicators_or_room():
    schedule = table(*CROSSED)
    assert check(schedule) == [] == check(schedule, edges="pair_fifo")
    problems = check(schedule, edges="pair_fifo", communicators=1)
    assert [str(problem) for problem in problems] == [
        f"deadlock: rank {rank}, action 4: {what} waits for ever where transfers are done in "
        "order, on 1 communicator with 0 send buffers"
        for rank, what in ((0, "0RECV_B0"), (1, "1RECV_F1"))
    ]
    assert check(schedule, edges="pair_fifo", communicators=1, send_buffers=1) == []


def test_a_receive_that_gets_another_message_is_named():
    """Activations and gradients in another order than sent: two links, one communicator."""
    rows = [[Post(1, 0, True, "a"), Post(1, 0, True, "b")]]
    rows.append([Post(0, 0, False, "b"), Post(0, 0, False, "a")])
    run = PairRun(rows, 0)
    run.run()
    assert run.at == [2, 2] and run.crossed == [(1, 0), (1, 1)]


def test_computations_hold_up_nothing():
    run = PairRun([[None, Post(1, 0, True, "a")], [Post(0, 0, False, "a"), None]], 0)
    run.run()
    assert run.at == [2, 2] and run.crossed == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"edges": "tree"}, "edges='tree'; expected 'links', 'pair_fifo' or 'group_fifo'"),
        ({"communicators": 3}, "communicators=3; expected 1 or 2"),
    ],
)
def test_wrong_options_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        check(table(*CROSSED), **options)
