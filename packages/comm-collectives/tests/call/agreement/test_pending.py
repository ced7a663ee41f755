"""Owed backwards: asked for once, and a late one of this rank's own is noticed."""

from comm_collectives.call.agreement.pending import PendingBackwards


def _do_nothing(_: object) -> None:
    return None


def test_word_tells_which_calls_are_owed() -> None:
    pending, other = PendingBackwards(), PendingBackwards()
    pending.add(3, _do_nothing)
    pending.add(70, _do_nothing)
    other.add(70, _do_nothing)
    assert pending.word == other.word ^ PendingBackwards.word_of(3) != other.word
    assert pending.start(3)
    assert pending.word == other.word
    assert pending.owes(70) and not pending.owes(3)
    pending.take(70)
    assert pending.word == 0
    assert len(pending) == 0


def test_backward_after_zeros_were_given_is_noticed_once() -> None:
    pending = PendingBackwards()
    pending.add(3, _do_nothing)
    pending.take(3)
    assert not pending.start(3)
    assert pending.start(3)


def test_dropped_graph_is_offered_until_it_is_taken() -> None:
    pending = PendingBackwards()
    pending.add(3, _do_nothing)
    assert pending.dropped() == []
    pending.drop(3)
    pending.drop(4)  # never owed
    assert pending.dropped() == [3]
    assert pending.dropped_event.is_set()
    pending.take(3)
    assert pending.dropped() == []


def test_old_calls_are_forgotten_alike_on_every_rank() -> None:
    pending, other = PendingBackwards(), PendingBackwards()
    for number in range(2000):
        pending.add(number, _do_nothing)
        pending.drop(number)
        other.add(number, _do_nothing)
    assert not pending.owes(500)
    assert pending.owes(1999)
    assert len(pending.dropped()) == len(pending) == 1024
    assert pending.word == other.word
