"""A snapshot on its way from the trainer to the saver process, and the future of its outcome.

report = pending.upload_completion.result()  # raises what went wrong in the background
"""

import threading
from concurrent.futures import Future
from dataclasses import dataclass

from unified_ckpt.saving import SaveReport
from unified_ckpt.snapshots import StagingBuffer, StagingLayout

_SETTLE_S = 60.0


class UploadFuture(Future["SaveReport | None"]):
    """The outcome of a save in the background: its report, None for a snapshot that wrote none.

    It knows whether somebody has looked; an error that nobody saw is raised by the next save.
    """

    def __init__(self) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()  # nothing takes a save back: `cancel` returns False
        self.seen = False

    def result(self, timeout: float | None = None) -> SaveReport | None:
        """As `Future.result`."""
        self._look(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """As `Future.exception`."""
        return self._look(timeout)

    def _look(self, timeout: float | None) -> BaseException | None:
        error = super().exception(timeout)
        self.seen = True
        return error


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingSave:
    """One snapshot: its number, the same on all ranks, and the staging memory to be filled.

    `head` says where in the buffer the request to the saver process stands.
    """

    number: int
    layout: StagingLayout
    buffer: StagingBuffer
    head: tuple[int, int]
    upload_completion: UploadFuture


class SaveQueue:
    """Where every save stands; used by the trainer's thread and by the one that reads answers.

    A save is open from its reservation to its end, submitted when it is filled, running when the
    saver process has it. One that a dead saver left may wait to be replayed for the moving average.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # of the replays
        self._open: dict[int, PendingSave] = {}
        self._submitted: set[int] = set()
        self._running: set[int] = set()
        self._replays: dict[int, PendingSave] = {}
        self._failed: list[UploadFuture] = []
        self._expected: list[UploadFuture] = []

    def add(self, pending: PendingSave) -> None:
        """Enter a pending save that was reserved."""
        with self._lock:
            self._open[pending.number] = pending

    def expect(self, pending: PendingSave) -> None:
        """Note that a save will be submitted, or fail, without more that the trainer does."""
        with self._lock:
            self._expected = [outcome for outcome in self._expected if not outcome.done()]
            if pending.upload_completion not in self._expected:
                self._expected.append(pending.upload_completion)

    def expected(self) -> list[UploadFuture]:
        """Return the outcomes that will come by themselves and are not there yet."""
        with self._lock:
            return [outcome for outcome in self._expected if not outcome.done()]

    def submit(self, pending: PendingSave) -> None:
        """Note that a pending save is filled; nothing if it has ended."""
        self.expect(pending)
        with self._lock:
            if pending.number in self._open:
                self._submitted.add(pending.number)

    def withdraw(self, pending: PendingSave) -> bool:
        """Close a pending save that was not submitted; False if it was, or has ended."""
        with self._lock:
            if pending.number in self._submitted:
                return False
            return self._open.pop(pending.number, None) is not None

    def next_to_send(self) -> PendingSave | None:
        """Return the first open save and count it as running, if it is submitted and not sent.

        Saves go in the order of their numbers, so that the savers of all ranks meet for the same
        one: an open save that is not submitted holds up those after it.
        """
        with self._lock:
            for number in sorted(self._open):
                if number not in self._submitted:
                    return None
                if number not in self._running:
                    self._running.add(number)
                    return self._open[number]
        return None

    def open_save(self, number: int) -> PendingSave | None:
        """Return the open save of that number."""
        with self._lock:
            return self._open.get(number)

    def all_open(self) -> list[PendingSave]:
        """Return the pending saves that have not ended, in order."""
        with self._lock:
            return [pending for _, pending in sorted(self._open.items())]

    def running(self) -> list[PendingSave]:
        """Return the pending_saves that the saver process has."""
        with self._lock:
            return [self._open[number] for number in sorted(self._running)]

    def end(self, pending: PendingSave, *, replay: bool = False) -> bool:
        """Close a pending save, to be replayed or not; False if that was done before."""
        with self._lock:
            if self._open.pop(pending.number, None) is None:
                return False
            self._submitted.discard(pending.number)
            self._running.discard(pending.number)
            if replay:
                self._replays[pending.number] = pending
            return True

    def to_replay(self) -> list[PendingSave]:
        """Return the pending_saves that a new saver process must replay, in order."""
        with self._lock:
            return [pending for _, pending in sorted(self._replays.items())]

    def replayed(self, number: int) -> PendingSave | None:
        """Strike a pending save that was replayed."""
        with self._lock:
            pending = self._replays.pop(number, None)
            self._changed.notify_all()
            return pending

    def wait_replayed(self, timeout_s: float) -> bool:
        """Wait until a saver process has replayed all that it must; False if it has not in time."""
        with self._lock:
            return self._changed.wait_for(lambda: not self._replays, timeout_s)

    def take_replays(self) -> list[PendingSave]:
        """Strike all pending_saves that were to be replayed, and return them."""
        with self._lock:
            taken, self._replays = list(self._replays.values()), {}
        return taken

    def note_failure(self, outcome: UploadFuture) -> None:
        """Remember a failed save until somebody has seen its error."""
        with self._lock:
            self._failed.append(outcome)

    def take_unseen(self) -> BaseException | None:
        """Return the first error that nobody has seen, and count all as seen."""
        with self._lock:
            unseen = [outcome for outcome in self._failed if not outcome.seen]
            self._failed = []
        # An outcome is noted right before it gets its error, by another thread.
        errors = [outcome.exception(_SETTLE_S) for outcome in unseen]
        return errors[0] if errors else None
