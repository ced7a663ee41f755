"""Notice signals and act on them later: a save must not begin in the middle of a step.

A cluster sends SIGTERM some time before it takes a machine away, a person sends SIGUSR1 to have a
checkpoint now. The handler only makes a note; the training loop looks at it between two steps. The
handlers that were there before come back with `close`.

    with SignalWatch() as watch:
        ...  # a step
        if watch.seen:
            ...
"""

import signal
import threading
from collections.abc import Callable, Collection, Sequence
from types import FrameType, TracebackType

Signals = signal.Signals
DEFAULT_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_STOPPING = frozenset({signal.SIGTERM, signal.SIGINT})

_Handler = Callable[[int, FrameType | None], object] | int | None


def stops_training(seen: Collection[Signals]) -> bool:
    """Whether one of the signals asks to end, and not only to save."""
    return not _STOPPING.isdisjoint(seen)


class SignalWatch:
    """Notes signals until it is closed.

    A signal that comes again before `clear` goes to the handler that was there before, so that a
    process that is stuck can still be ended.

    Args:
        signals: which signals to note.

    Raises:
        ValueError: called outside the main thread, where Python takes no handlers.
    """

    def __init__(self, signals: Sequence[Signals] = DEFAULT_SIGNALS) -> None:
        if signals and threading.current_thread() is not threading.main_thread():
            raise ValueError(
                "signals can be watched from the main thread only; make the watch there, or pass "
                "signals=()"
            )
        self._seen: set[Signals] = set()
        self._before: dict[signal.Signals, _Handler] = {}
        for number in signals:
            self._before[number] = signal.signal(number, self._note)

    @property
    def seen(self) -> frozenset[Signals]:
        """The signals that came since the last `clear`."""
        return frozenset(self._seen)

    def clear(self) -> None:
        """Forget what came."""
        self._seen.clear()

    def close(self) -> None:
        """Give every signal its former handler back; safe to call twice, from the main thread."""
        for number, before in self._before.items():
            if signal.getsignal(number) == self._note:  # another handler since then stays
                signal.signal(number, signal.SIG_DFL if before is None else before)
        self._before = {}

    def __enter__(self) -> "SignalWatch":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _note(self, number: int, frame: FrameType | None) -> None:
        name = Signals(number)
        if name not in self._seen:
            self._seen.add(name)
            return
        before = self._before.get(name)
        if callable(before):
            before(number, frame)
        elif before == signal.SIG_DFL or before is None:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
