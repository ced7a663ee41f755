import os
import threading
import time

import pytest

from moe_train.errors import MoeTrainError
from moe_train.training.prefetch import Prefetcher


class Maker:
    """Notes what it makes, in which thread; may wait or fail at some key."""

    def __init__(self, fails_at: int = -1, waits_at: int = -1) -> None:
        self.made: list[int] = []
        self.threads: set[str] = set()
        self.fails_at, self.waits_at = fails_at, waits_at
        self.go = threading.Event()

    def __call__(self, key: int) -> str:
        self.threads.add(threading.current_thread().name)
        if key == self.waits_at:
            self.go.wait(10)
        if key == self.fails_at:
            raise OSError(f"disk gone at {key}")
        self.made.append(key)
        return f"batch {key}"


def until(condition: object) -> None:
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:  # type: ignore[operator]
        time.sleep(0.001)


def test_two_are_made_ahead_in_order_and_none_behind_the_last() -> None:
    maker = Maker()
    with Prefetcher(maker, range(0, 50, 10), depth=2, timeout_s=10) as coming:
        assert coming.get(0) == "batch 0"
        until(lambda: len(maker.made) == 3)
        time.sleep(0.02)
        assert maker.made == [0, 10, 20]
        assert [coming.get(key) for key in (10, 20, 30, 40)][-1] == "batch 40"
    assert maker.made == [0, 10, 20, 30, 40]
    assert len(maker.threads) == 1 and threading.current_thread().name not in maker.threads


def test_depth_0_makes_each_when_it_is_asked_for_and_starts_no_thread() -> None:
    maker = Maker()
    with Prefetcher(maker, range(0, 50, 10), depth=0, timeout_s=10) as coming:
        assert coming.get(20) == "batch 20"
        assert maker.made == [20]
    assert maker.threads == {threading.current_thread().name}


def test_a_jump_forgets_what_nobody_will_ask_for() -> None:
    maker = Maker()
    with Prefetcher(maker, range(0, 100, 10), depth=2, timeout_s=10) as coming:
        coming.get(0)
        assert coming.get(70) == "batch 70"
        assert coming.get(0) == "batch 0", "and back"
        assert coming.get(7) == "batch 7", "what is none of the keys is made when asked for"


def test_an_error_is_raised_at_the_step_that_needs_the_batch() -> None:
    with Prefetcher(Maker(fails_at=20), range(0, 50, 10), depth=2, timeout_s=10) as coming:
        assert [coming.get(0), coming.get(10)] == ["batch 0", "batch 10"]
        with pytest.raises(OSError, match="disk gone at 20"):
            coming.get(20)


def test_a_batch_that_does_not_come_is_an_error_and_closing_waits_no_longer() -> None:
    maker = Maker(waits_at=10)
    coming = Prefetcher(maker, range(0, 50, 10), depth=2, timeout_s=0.05)
    assert coming.get(0) == "batch 0"
    with pytest.raises(MoeTrainError, match=r"sample 10 was not read within 0.05 s; .*disk"):
        coming.get(10)
    began = time.monotonic()
    coming.close()
    assert time.monotonic() - began < 5
    maker.go.set()
    coming.close()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_makes_its_own() -> None:
    maker = Maker()
    coming = Prefetcher(maker, range(0, 50, 10), depth=2, timeout_s=10)
    coming.get(0)
    until(lambda: len(maker.made) == 3)
    pid = os.fork()
    if pid == 0:
        right = False
        try:
            right = [coming.get(10), coming.get(20)] == ["batch 10", "batch 20"]
            coming.close()
        finally:
            os._exit(0 if right else 1)
    assert os.waitpid(pid, 0)[1] == 0
    coming.close()


def test_nothing_that_was_left_out_is_waited_for() -> None:
    maker = Maker(waits_at=10)
    coming = Prefetcher(maker, range(0, 50, 10), depth=3, timeout_s=30)
    assert coming.get(0) == "batch 0"
    until(lambda: len(maker.threads) == 1 and maker.made == [0])
    threading.Timer(0.2, maker.go.set).start()  # 10 is being made, 20 and 30 wait behind it
    started = time.monotonic()
    coming.close()
    assert 0.1 < time.monotonic() - started < 10
    assert maker.made == [0, 10]
