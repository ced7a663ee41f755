"""Owed backwards: who joins which with zeros, and why not."""

import gc

import pytest

from comm_collectives.call.agreement.pending import PendingBackwards, Standing, agreed_backward


def _do_nothing(_: object) -> None:
    return None


def _owing(*numbers: int) -> PendingBackwards:
    pending = PendingBackwards()
    for number in numbers:
        pending.add(number, _do_nothing, order=number)
    return pending


def test_only_a_graph_dropped_untouched_gets_zeros() -> None:
    pending = _owing(3, 4, 5, 6)
    pending.touch(4)
    for number in (3, 4):
        pending.drop(number)
    assert [pending.stands(n) for n in (3, 4, 5, 9)] == [
        Standing.JOINS,
        Standing.TOUCHED,
        Standing.HOLDS,
        Standing.HOLDS,
    ]
    pending.fail()
    assert {pending.stands(n) for n in (3, 4, 5, 6)} == {Standing.FAILED}
    pending.add(7, _do_nothing)
    pending.drop(7)
    assert pending.stands(7) == Standing.JOINS


def test_reasons_name_the_calls() -> None:
    pending = _owing(3, 4)
    pending.drop(4)
    assert pending.why([3, 4]).startswith("call 3 still has its graph here")
    pending.fail()
    assert pending.why([4]) == "a backward pass here ended in an exception ahead of call 4"


def test_calls_to_answer_for_are_those_dropped_untouched_or_failed() -> None:
    pending = _owing(2, 3, 4)
    pending.touch(2)
    pending.drop(2)
    assert pending.answerable() == {}
    pending.forget([2])
    pending.noticed.get()
    assert pending.noticed.empty()
    pending.drop(4)
    pending.drop(5)  # never owed
    assert not pending.noticed.empty()
    assert pending.answerable() == {4: True}
    pending.fail()
    assert pending.answerable() == {3: False, 4: True}
    pending.take(4)
    pending.start(3)
    assert len(pending) == 0


def test_graphs_that_live_are_known_by_their_place() -> None:
    pending = _owing(3, 4)
    assert pending.lives_before(4)
    assert not pending.lives_before(3)
    pending.drop(3)
    assert not pending.lives_before(4)


def test_graph_may_go_while_another_is_noted() -> None:
    """A garbage collection finds one where it likes: also inside of what notes another."""
    pending, graphs = _owing(*range(200)), []

    class Graph:
        def __init__(self, number: int) -> None:
            self.number, self.itself = number, self

        def __del__(self) -> None:
            pending.drop(self.number)

    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for number in range(200):
            graphs.append(Graph(number))
            graphs.clear()
            pending.drop(number)
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert all(pending.answerable().values())


def test_old_calls_are_forgotten_alike_on_every_rank() -> None:
    pending = PendingBackwards()
    for number in range(2000):
        pending.add(number, _do_nothing)
        pending.drop(number)
    assert pending.stands(500) == Standing.HOLDS
    assert pending.stands(1999) == Standing.JOINS
    assert len(pending) == 1024


@pytest.mark.parametrize(
    ("told", "number"),
    [
        (["jj", "jj"], 6),
        (["jj", "jh"], 5),
        (["jh", "fj"], None),
        (["tj", "jj", "jj"], 6),
        (["", "jj"], None),
    ],
)
def test_latest_backward_that_all_can_run_is_agreed_on(told: list[str], number: int | None) -> None:
    assert agreed_backward([5, 6], told) == number
