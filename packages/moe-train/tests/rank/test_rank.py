import os
import signal
import threading

import pytest

from moe_train.rank.rank import RankContext, watch_stop_signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_only_noted_however_often_they_come(number: signal.Signals) -> None:
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    context = watch_stop_signals()
    try:
        assert not context.stop_requested
        for sent in (number, signal.SIGTERM, number):
            os.kill(os.getpid(), sent)
        assert context.stop_requested
        assert context.signals.seen == {number, signal.SIGTERM}
    finally:
        context.signals.close()
    assert {n: signal.getsignal(n) for n in before} == before


def test_a_context_of_its_own_watches_nothing() -> None:
    context = RankContext()
    assert (context.stop_requested, context.step) == (False, 0)


def test_signals_are_refused_outside_of_the_main_thread() -> None:
    errors: list[Exception] = []

    def watch() -> None:
        try:
            watch_stop_signals()
        except ValueError as error:
            errors.append(error)

    thread = threading.Thread(target=watch)
    thread.start()
    thread.join()
    assert len(errors) == 1
