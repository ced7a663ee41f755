"""Time, and work that may hang."""

import threading

from comm_collectives.base.transport.clock import SYSTEM_CLOCK


def test_work_aside_is_waited_for_only_so_long() -> None:
    never, done = threading.Event(), []
    assert SYSTEM_CLOCK.aside(lambda: done.append(1), 30.0)
    assert done == [1]
    assert not SYSTEM_CLOCK.aside(never.wait, 0.05)  # type: ignore[arg-type]
    never.set()
