import os
import signal
import threading

import pytest

from moe_train.launch.signals import StopFlag


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_sets_the_flag_and_is_named(number: signal.Signals) -> None:
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    stop = StopFlag()
    stop.install()
    stop.install()
    try:
        assert (stop.requested, stop.signal_name) == (False, "")
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGTERM)
        assert (stop.requested, stop.signal_name) == (True, number.name)
    finally:
        stop.uninstall()
    assert {n: signal.getsignal(n) for n in before} == before


def test_request_sets_the_flag_without_a_signal() -> None:
    stop = StopFlag()
    stop.request()
    assert (stop.requested, stop.signal_name) == (True, "SIGTERM")


def test_install_outside_of_the_main_thread_is_refused() -> None:
    errors: list[Exception] = []

    def install() -> None:
        try:
            StopFlag().install()
        except ValueError as error:
            errors.append(error)

    thread = threading.Thread(target=install)
    thread.start()
    thread.join()
    assert len(errors) == 1
