"""torch's watchdog: a call of a communicator that is not over at its limit kills the process.

watchdog = Watchdog(30.0, kills=True)
watchdog.add(pending)
"""

import faulthandler
import os
import signal
import sys
import threading
import time
from typing import final

from devicetest.nccl.exchange import Pending

_LOOK_S = 0.1


@final
class Watchdog:
    """Keeps what a communicator has under way; where it `kills`, a thread looks at the limit."""

    def __init__(self, limit_s: float, *, kills: bool) -> None:
        self._limit_s, self._kills = limit_s, kills
        self._lock = threading.Lock()
        self._under_way: list[tuple[float, Pending]] = []
        if kills:
            threading.Thread(target=self._look, name="nccl rules: watchdog", daemon=True).start()

    def add(self, pending: Pending) -> None:
        """Look after a call."""
        with self._lock:
            on = [each for each in self._under_way if not each[1].ended.is_set()]
            self._under_way = [*on, (time.monotonic(), pending)]

    def stop(self) -> list[Pending]:
        """Look after nothing any more; return what was under way."""
        with self._lock:
            stopped, self._under_way = self._under_way, []
        return [pending for _, pending in stopped if not pending.ended.is_set()]

    def _look(self) -> None:
        while True:
            time.sleep(_LOOK_S)
            with self._lock:
                on = [each for each in self._under_way if not each[1].ended.is_set()]
                self._under_way = on
            late = [pending for since, pending in on if time.monotonic() - since > self._limit_s]
            if late:
                text = f"Watchdog caught collective operation timeout: {late[0].label}\n"
                sys.stderr.write(text)
                sys.stderr.flush()
                faulthandler.disable()
                os.kill(os.getpid(), signal.SIGABRT)
