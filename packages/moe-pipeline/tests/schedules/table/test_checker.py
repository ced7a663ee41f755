"""The oracle writes a schedule's rules as one graph of what must precede what.

Legal means that each expected action is there once and the graph has no cycle. The checker follows
memory and lets ranks run instead, so the two share no reasoning.
"""

import random
from collections import Counter, defaultdict
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from itertools import chain, pairwise

import pytest

from moe_pipeline.schedules.generators.basic import forward_then_backward, one_f_one_b
from moe_pipeline.schedules.generators.catalog import SCHEDULES
from moe_pipeline.schedules.generators.dual_pipe import dualpipe
from moe_pipeline.schedules.table.checker import check
from moe_pipeline.schedules.table.schedule import Action, Kind, Schedule, add_transfers

F, B = Kind.FORWARD, Kind.BACKWARD
Ig, Wg = Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT
SF, RF, SB, RB = (
    Kind.SEND_FORWARD,
    Kind.RECV_FORWARD,
    Kind.SEND_BACKWARD,
    Kind.RECV_BACKWARD,
)


def is_legal(schedule, send_buffers=1):
    places = places_of(schedule)
    if places is None:
        return False
    edges = list(microbatch_edges(schedule, places))
    found = Counter(a for row in schedule.ranks for a in row)
    if found != Counter(set(chain.from_iterable(edges)) - {None}):
        return False
    for rank, row in enumerate(schedule.ranks):
        if any(places[a.stage, a.microbatch] != rank for a in row):
            return False
    links = link_edges(schedule, places, send_buffers)
    if links is None:
        return False
    graph = defaultdict(set)
    for first, second in (
        *links,
        *edges,
        *(pair for row in schedule.ranks for pair in pairwise(row)),
    ):
        graph[second].add(first)
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError:
        return False
    return True


def places_of(schedule):
    """The rank of each stage and microbatch, None when one has none or a stage has too many."""
    places, ranks_of = {}, defaultdict(set)
    for rank, row in enumerate(schedule.ranks):
        for a in row:
            places.setdefault((a.stage, a.microbatch), rank)
            ranks_of[a.stage].add(rank)
    wanted = {(s, m) for s in range(schedule.num_stages) for m in range(schedule.num_microbatches)}
    if set(places) != wanted or any(len(r) > schedule.copies for r in ranks_of.values()):
        return None
    return places


def microbatch_edges(schedule, places):
    """What must precede what on the way of each microbatch through the stages and back.

    An edge from None says only that the action must be there.
    """
    present = {a for row in schedule.ranks for a in row}
    last = schedule.num_stages - 1
    for m in range(schedule.num_microbatches):
        way = []
        for s in range(last + 1):
            crosses_in = s > 0 and places[s - 1, m] != places[s, m]
            crosses_out = s < last and places[s + 1, m] != places[s, m]
            way += [Action(s, kind, m) for kind in [RF] * crosses_in + [F] + [SF] * crosses_out]
        for s in range(last, -1, -1) if schedule.has_backward else ():
            halved = bool({Action(s, Ig, m), Action(s, Wg, m)} & present)
            crosses_in = s < last and places[s + 1, m] != places[s, m]
            crosses_out = s > 0 and places[s - 1, m] != places[s, m]
            back = [RB] * crosses_in + [Ig if halved else B] + [SB] * crosses_out
            way += [Action(s, kind, m) for kind in back]
            if halved:
                yield Action(s, Ig, m), Action(s, Wg, m)
        yield from pairwise([None, *way])


def link_edges(schedule, places, send_buffers):
    """Receives that must precede later sends for want of buffers; None: sent in another order."""
    sent, received = defaultdict(list), defaultdict(list)
    for rank, row in enumerate(schedule.ranks):
        for a in row:
            step = {SF: 1, SB: -1, RF: -1, RB: 1}.get(a.kind)
            if step is None:
                continue
            other = places[a.stage + step, a.microbatch]
            if a.kind in (SF, SB):
                partner = Action(a.stage + step, RF if a.kind is SF else RB, a.microbatch)
                sent[rank, other, partner.kind].append((a, partner))
            else:
                received[other, rank, a.kind].append(a)
    edges = []
    for link in set(sent) | set(received):
        if [partner for _, partner in sent[link]] != received[link]:
            return None
        edges += zip(received[link], [a for a, _ in sent[link]][send_buffers:], strict=False)
    return edges


def with_row(schedule, rank, row):
    rows = list(schedule.ranks)
    rows[rank] = tuple(row)
    return replace(schedule, ranks=tuple(rows))


def mutants(schedule):
    """Every drop, every duplicate (in place and at the end) and every swap on a rank."""
    for rank, row in enumerate(schedule.ranks):
        for i in range(len(row)):
            yield with_row(schedule, rank, row[:i] + row[i + 1 :])
            yield with_row(schedule, rank, row[: i + 1] + row[i:])
            yield with_row(schedule, rank, (*row, row[i]))
            for j in range(i + 1, len(row)):
                yield with_row(
                    schedule, rank, (*row[:i], row[j], *row[i + 1 : j], row[i], *row[j + 1 :])
                )


def judge(candidates):
    rejected = accepted = 0
    for mutant in candidates:
        legal = is_legal(mutant)
        problems = check(mutant)
        assert legal == (problems == []), (mutant, problems)
        accepted, rejected = accepted + legal, rejected + (not legal)
    return accepted, rejected


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (2, 2)])
def test_every_mutant_is_judged_as_the_oracle_does(name, stages, microbatches):
    _, rejected = judge(mutants(SCHEDULES[name](stages, microbatches)))
    assert rejected > 0


@pytest.mark.parametrize("name", SCHEDULES)
def test_mutants_of_larger_schedules_are_judged_as_the_oracle_does(name, seed):
    draw = random.Random(seed)
    schedule = SCHEDULES[name](draw.randint(3, 4), draw.randint(5, 8))
    assert is_legal(schedule)
    judge(draw.sample(list(mutants(schedule)), 40))


def test_a_weight_gradient_needs_its_input_gradient_and_both_halves():
    text = "0F0 0I0 0W0"
    schedule = Schedule(
        name="t", num_stages=1, num_microbatches=1, ranks=(tuple(map(Action.parse, text.split())),)
    )
    row = schedule.ranks[0]
    assert check(schedule) == []
    assert kinds(with_row(schedule, 0, (row[0], row[2], row[1]))) == {"dependency"}
    assert kinds(with_row(schedule, 0, row[:2])) == {"completeness"}
    assert "completeness" in kinds(with_row(schedule, 0, (*row, Action.parse("0B0"))))


def test_a_stage_may_lie_on_as_many_ranks_as_it_has_copies():
    schedule = dualpipe(4, 4)
    assert check(schedule) == []
    assert kinds(replace(schedule, copies=1)) == {"placement"}
    moved = Action.parse("0F0")
    assert "placement" in kinds(with_row(schedule, 2, (*schedule.ranks[2], moved)))


def test_rows_exchanged_between_ranks_are_rejected():
    schedule = one_f_one_b(3, 4)
    rows = schedule.ranks
    assert check(replace(schedule, ranks=(rows[1], rows[0], rows[2]))) == []  # only another mapping
    mixed = with_row(schedule, 0, (*rows[0], rows[1][-1]))
    assert any(problem.kind == "placement" for problem in check(mixed))


def kinds(schedule, **kwargs):
    return {problem.kind for problem in check(schedule, **kwargs)}


def test_each_kind_of_problem_is_named():
    schedule = forward_then_backward(2, 2)
    row = schedule.ranks[0]
    assert kinds(replace(schedule, num_stages=3)) == {"placement"}
    assert kinds(replace(schedule, num_microbatches=1)) == {"placement"}
    assert "completeness" in kinds(with_row(schedule, 0, row[:-1]))
    assert "dependency" in kinds(with_row(schedule, 0, (row[1], row[0], *row[2:])))
    twice = with_row(schedule, 0, (row[0], row[1], row[1], *row[2:]))
    assert {"freed", "completeness"} <= kinds(twice)
    swapped = (row[0], row[2], row[3], row[1], *row[4:])
    assert "link" in kinds(with_row(schedule, 0, swapped))
    crossing = ["0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1"]
    crossing += ["1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"]
    rows = tuple(tuple(map(Action.parse, row.split())) for row in crossing)
    assert kinds(replace(schedule, ranks=rows), send_buffers=0) == {"deadlock"}


def test_a_backward_before_its_gradient_can_arrive_is_a_deadlock():
    text = ["0F0 0SEND_F0 0RECV_B0 0B0 0F1 0SEND_F1 0RECV_B1 0B1"]
    text += ["1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1"]
    ranks = tuple(tuple(map(Action.parse, row.split())) for row in text)
    schedule = Schedule(name="t", num_stages=2, num_microbatches=2, ranks=ranks)
    assert [str(problem) for problem in check(schedule)] == [
        "deadlock: rank 0, action 2: 0RECV_B0 waits for ever with 1 send buffers",
        "deadlock: rank 1, action 2: 1RECV_F1 waits for ever with 1 send buffers",
    ]


def test_stages_that_share_a_rank_pass_without_transfers():
    rows = ["0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0"]
    ranks = tuple(tuple(map(Action.parse, row.split())) for row in rows)
    schedule = add_transfers(Schedule(name="v", num_stages=4, num_microbatches=1, ranks=ranks))
    assert check(schedule) == []
    wrong = [a for a in schedule.ranks[1] if str(a) not in ("1F0", "2F0")]
    wrong[1:1] = [Action.parse("2F0"), Action.parse("1F0")]
    assert "dependency" in kinds(with_row(schedule, 1, wrong))


def test_a_schedule_without_actions_reports_its_missing_stages():
    empty = Schedule(name="t", num_stages=2, num_microbatches=1, ranks=((), ()))
    assert [str(problem) for problem in check(empty)] == [
        "placement: stage 0 is on no rank",
        "placement: stage 1 is on no rank",
    ]


def test_negative_send_buffers_are_refused():
    with pytest.raises(ValueError, match="send_buffers must be at least 0, got -1"):
        check(one_f_one_b(2, 2), send_buffers=-1)
