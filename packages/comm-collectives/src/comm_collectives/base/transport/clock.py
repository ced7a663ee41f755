"""By which time this package waits, and work that may hang.

Everything that waits with a limit asks the clock of its transport, so that the simulator can run
the same code in virtual time.

    deadline_s = clock.now_s() + 2.0
    while not arrived() and clock.now_s() < deadline_s:
        streams.wait([peer], (), deadline_s - clock.now_s())
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import final


class Clock(ABC):
    """The time of one rank, and how its threads wait for each other."""

    @abstractmethod
    def now_s(self) -> float:
        """Return the time in seconds since some moment; never goes back."""

    @abstractmethod
    def lock(self) -> AbstractContextManager[object]:
        """Return a lock of the threads of one rank."""

    @abstractmethod
    def condition(self) -> threading.Condition:
        """Return a condition of the threads of one rank, with a lock of its own."""

    @abstractmethod
    def aside(self, work: Callable[[], None], limit_s: float) -> bool:
        """Run `work`, which may hang, and wait for it for so long; False if it is not done."""


@final
class SystemClock(Clock):
    """The machine's own time."""

    def now_s(self) -> float:
        """As `time.monotonic`."""
        return time.monotonic()

    def lock(self) -> AbstractContextManager[object]:
        """As threading has it."""
        return threading.Lock()

    def condition(self) -> threading.Condition:
        """As threading has it."""
        return threading.Condition()

    def aside(self, work: Callable[[], None], limit_s: float) -> bool:
        """Run in a thread, which is left behind if it takes too long."""
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(limit_s)
        return not thread.is_alive()


SYSTEM_CLOCK = SystemClock()
