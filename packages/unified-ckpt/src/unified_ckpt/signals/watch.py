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
import time
from collections.abc import Callable, Collection, Sequence
from types import FrameType

from unified_ckpt.errors import CheckpointValueError

Signals = signal.Signals
DEFAULT_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_STOPPING = frozenset({signal.SIGTERM, signal.SIGINT})

_Handler = Callable[[int, FrameType | None], object] | int | None


def stops_training(seen: Collection[Signals]) -> bool:
    """Whether one of the signals asks to end, and not only to save."""
    return not _STOPPING.isdisjoint(seen)


class SignalWatch:
    """Notes signals until it is closed.

    A signal that comes again before `clear`, later than `repeat_s`, goes to the handler that was
    there before, so that a process that is stuck can still be ended. Where there was none, one that
    asks to save (SIGUSR1) asks for nothing more, and does not end the process.

    Args:
        signals: which signals to note.
        repeat_s: what comes again within this time is the same request, as when a cluster signals
            all processes of a job and the launcher passes on to its workers what it got.

    Raises:
        CheckpointValueError: called outside the main thread, where Python takes no handlers; or one
            of the signals cannot be noted (SIGKILL). No handler was changed then.
    """

    def __init__(
        self, signals: Sequence[Signals] = DEFAULT_SIGNALS, *, repeat_s: float = 2.0
    ) -> None:
        if signals and threading.current_thread() is not threading.main_thread():
            raise CheckpointValueError(
                "signals can be watched from the main thread only; make the watch there, or pass "
                "signals=()"
            )
        self._repeat_s = repeat_s
        self._seen: dict[Signals, float] = {}  # when it came first
        self._before: dict[signal.Signals, _Handler] = {}
        for number in dict.fromkeys(signals):  # each once, or it would be its own former handler
            try:
                self._before[number] = signal.signal(number, self._note)
            except (OSError, ValueError, TypeError) as error:
                self.close()
                raise CheckpointValueError(
                    f"signals has {number!r}, which cannot be noted: {error}; name others"
                ) from error

    @property
    def seen(self) -> frozenset[Signals]:
        """The signals that came since the last `clear`."""
        return frozenset(self._seen)

    def clear(self, *, stopping: bool = True) -> None:
        """Forget what came; with `stopping` False not what asks to end."""
        for name in self.seen:
            if stopping or not stops_training([name]):
                self._seen.pop(name, None)

    def close(self) -> None:
        """Give every signal its former handler back; safe to call twice, from the main thread."""
        for number, before in self._before.items():
            if signal.getsignal(number) == self._note:  # another handler since then stays
                signal.signal(number, signal.SIG_DFL if before is None else before)
        self._before = {}

    def __enter__(self) -> "SignalWatch":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _note(self, number: int, frame: FrameType | None) -> None:
        name, now_s = Signals(number), time.monotonic()
        if now_s - self._seen.setdefault(name, now_s) <= self._repeat_s:
            return
        before = self._before.get(name)
        if callable(before):
            before(number, frame)
        elif before in (signal.SIG_DFL, None) and stops_training([name]):
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
