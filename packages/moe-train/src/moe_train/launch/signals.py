"""A request to stop that is only ever a flag, so that a step is never cut in two.

Invariant: the handler does nothing but set the flag, however often a signal comes; who reads it
between steps decides what follows. A second Ctrl-C is the launcher's business: it kills the ranks.

    stop = StopFlag()
    stop.install()
    while not stop.requested:
        train_one_step()
"""

import signal
from collections.abc import Sequence
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Signals that ask a job to save and end: Ctrl-C, and what schedulers and `kill` send."""


class StopFlag:
    """Set by SIGINT or SIGTERM once installed, or by `request`."""

    __slots__ = ("_previous", "_signal")

    def __init__(self) -> None:
        self._signal: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def install(self, signals: Sequence[signal.Signals] = STOP_SIGNALS) -> None:
        """Handle `signals` in this process from now on.

        Raises:
            ValueError: called outside of the main thread.
        """
        for number in signals:
            self._previous.setdefault(number, signal.signal(number, self._handle))

    def uninstall(self) -> None:
        """Give the signals back to whoever handled them before `install`."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def request(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Ask to stop as if `number` had come. The first request is the one that is named."""
        if self._signal is None:
            self._signal = number

    @property
    def requested(self) -> bool:
        """Whether anyone has asked this process to stop."""
        return self._signal is not None

    @property
    def signal_name(self) -> str:
        """Name of the first signal that came, for example `SIGINT`; empty when none did."""
        return "" if self._signal is None else self._signal.name

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.request(signal.Signals(number))
