import os
import signal
import subprocess
import sys
import threading

import pytest

from unified_ckpt.signals.watch import SignalWatch, stops_training


def test_a_signal_is_noted_and_the_former_handlers_come_back() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    with SignalWatch() as watch:
        assert watch.seen == frozenset()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert watch.seen == {signal.SIGUSR1} and not stops_training(watch.seen)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stops_training(watch.seen)
        watch.clear()
        assert watch.seen == frozenset()
    assert {number: signal.getsignal(number) for number in before} == before
    watch.close()


def test_a_handler_that_was_set_later_is_not_taken_away() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    watch = SignalWatch([signal.SIGUSR1])
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    watch.close()
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
    signal.signal(signal.SIGUSR1, before)


def test_a_second_signal_goes_to_the_former_handler() -> None:
    calls = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: calls.append(number))
    with SignalWatch([signal.SIGUSR1], repeat_s=0.0) as watch:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert calls == [] and watch.seen
        os.kill(os.getpid(), signal.SIGUSR1)
        assert calls == [signal.SIGUSR1]
    signal.signal(signal.SIGUSR1, before)


def test_a_signal_that_is_named_twice_is_noted_once() -> None:
    calls = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: calls.append(number))
    with SignalWatch([signal.SIGUSR1, signal.SIGUSR1], repeat_s=0.0) as watch:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert watch.seen == {signal.SIGUSR1}
        os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert calls == [signal.SIGUSR1] * 2
    signal.signal(signal.SIGUSR1, before)


def test_a_signal_that_cannot_be_noted_changes_no_handler() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(ValueError, match=r"signals has .*SIGKILL.*, which cannot be noted: "):
        SignalWatch([signal.SIGUSR1, signal.SIGKILL])
    assert signal.getsignal(signal.SIGUSR1) == before


def test_a_second_sigterm_ends_a_process_that_is_stuck() -> None:
    code = (
        "import os, signal, time\nfrom unified_ckpt.signals.watch import SignalWatch\n"
        "watch = SignalWatch(repeat_s=0.1)\nos.kill(os.getpid(), signal.SIGTERM)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\nprint('noted', flush=True)\ntime.sleep(0.2)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(20)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "noted\n")


def test_asking_twice_for_a_checkpoint_does_not_end_the_process() -> None:
    before = signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # which ends it
    with SignalWatch([signal.SIGUSR1], repeat_s=0.0) as watch:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert watch.seen == {signal.SIGUSR1}
    signal.signal(signal.SIGUSR1, before)


def test_what_asks_to_end_stays_when_only_the_rest_is_cleared() -> None:
    with SignalWatch() as watch:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        watch.clear(stopping=False)
        assert watch.seen == {signal.SIGTERM}


def test_other_threads_are_told_to_use_the_main_thread() -> None:
    said = []

    def fn() -> None:
        with pytest.raises(ValueError, match="main thread only; make the watch there") as caught:
            SignalWatch()
        said.append(str(caught.value))

    thread = threading.Thread(target=fn)
    thread.start()
    thread.join()
    assert said
