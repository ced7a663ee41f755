"""The thread of a lane that does what nobody waits for, as long as there is any.

Invariant: what fails once is told once, and keeps the helper from nothing else.

    threading.Thread(target=help_beside, args=(ref(lane), jobs), daemon=True).start()
"""

import logging
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Protocol
from weakref import ref

from comm_collectives.call.handles import Caught
from comm_collectives.errors import CommError

_LOG = logging.getLogger(__name__)
FIRST_TICK_S, _LONGEST_TICK_S = 5e-4, 4e-3  # between two looks


class Helped(Protocol):
    """A lane, as its helper sees it."""

    def help(self) -> bool:
        """Send and read ahead what is possible; whether anything of that is left."""


def is_told(caught: Caught) -> bool:
    """Log what nobody else hears of, and whether it is that; who waits has errors of his own."""
    if caught.error is None or isinstance(caught.error, CommError):
        return False
    _LOG.error("transfers beside the program have failed once", exc_info=caught.error)
    return True


def help_beside(lane_of: "ref[Helped]", jobs: "SimpleQueue[Callable[[], object] | None]") -> None:
    """Run jobs, and look after what is under way as long as there is any."""
    tick_s: float | None = None
    while True:
        try:
            job = jobs.get(timeout=tick_s)
            if job is None:
                return
            with Caught(Exception) as caught:  # the next ones are to run all the same
                job()
            is_told(caught)
            del job, caught  # what they hold must not live until the next one comes
            tick_s = None
        except Empty:
            pass
        lane = lane_of()
        if lane is None:
            return
        is_left = lane.help()
        del lane
        longest_s = min(_LONGEST_TICK_S, 2 * (tick_s or FIRST_TICK_S))
        tick_s = longest_s if is_left else None
