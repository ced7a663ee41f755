"""Groups that a rank has not used, in which others may wait for it: said and asked in the store.

Invariant: a store that does not answer holds up nobody for long, and at most one thread of all.

    spoken = SpokenOf()
    spoken.make_known(state)         # this rank waits there
    spoken.is_known(state)           # some rank waits there
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import final

from comm_collectives.call.groups import GroupState

_STORE_S = 0.25  # how long a wait stops for the store, and how often it looks there
_KEY = "comm_collectives/waits/{}"
_STORE = threading.Semaphore()  # taken while the store is asked something, which may hang


@final
class SpokenOf:
    """Of one group, whether there is something to hear in it."""

    def __init__(self) -> None:
        self._is_known, self._looks_at_s = False, 0.0

    def make_known(self, state: GroupState) -> None:
        """Let the others know, once, that there is."""
        if self._is_known or state.opener is not None:
            return

        def tell() -> None:
            state.store().set(_KEY.format(state.name), "1")
            self._is_known = True

        _ask_store(state, tell)

    def is_known(self, state: GroupState) -> bool:
        """Whether there is, as far as the store has said so far."""
        if self._is_known or time.monotonic() < self._looks_at_s:
            return self._is_known
        self._looks_at_s = time.monotonic() + _STORE_S

        def look() -> None:
            self._is_known |= state.store().check([_KEY.format(state.name)])

        _ask_store(state, look)
        return self._is_known


def _ask_store(state: GroupState, work: Callable[[], None]) -> None:
    """Have something asked of the store, unless it has not answered the last time, in any group."""

    def run() -> None:
        try:
            with suppress(
                RuntimeError, ValueError
            ):  # it has ended: nobody hears of this group there
                work()
        finally:
            _STORE.release()

    if _STORE.acquire(blocking=False):
        state.transport.clock.aside(run, _STORE_S)
