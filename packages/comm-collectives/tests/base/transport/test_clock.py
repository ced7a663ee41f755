"""Time, sleep, and work that may hang."""

import threading

from comm_collectives.base.transport.clock import SYSTEM_CLOCK


def test_sleep_lets_time_pass() -> None:
    started_s = SYSTEM_CLOCK.now_s()
    SYSTEM_CLOCK.sleep(0.05)
    assert SYSTEM_CLOCK.now_s() - started_s >= 0.05


def test_work_aside_is_waited_for_only_so_long() -> None:
    never, done = threading.Event(), []
    assert SYSTEM_CLOCK.aside(lambda: done.append(1), 30.0)
    assert done == [1]
    assert not SYSTEM_CLOCK.aside(never.wait, 0.05)  # type: ignore[arg-type]
    never.set()
