"""A snapshot on its way from the trainer to the saver process, and the future of its outcome.

report = ticket.upload_completion.result()  # raises what went wrong in the background
"""

import threading
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unified_ckpt.saving import SaveReport
from unified_ckpt.snapshots import StagingBuffer, StagingLayout

if TYPE_CHECKING:
    _ReportFuture = Future[SaveReport | None]
else:
    _ReportFuture = Future


_SETTLE_S = 60.0


class UploadFuture(_ReportFuture):
    """The outcome of a save in the background: its report, None for a snapshot that wrote none.

    It knows whether somebody has looked; an error that nobody saw is raised by the next save.
    """

    def __init__(self) -> None:
        super().__init__()
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
class Ticket:
    """One snapshot: its number, the same on all ranks, and the staging memory to be filled.

    `head` says where in the buffer the request to the saver process stands.
    """

    number: int
    layout: StagingLayout
    buffer: StagingBuffer
    head: tuple[int, int]
    upload_completion: UploadFuture


class TicketBook:
    """Where every ticket stands; used by the trainer's thread and by the one that reads answers.

    A ticket is open from its reservation to its end, submitted when it is filled, running when the
    saver process has it. One that a dead saver left may wait to be redone for the moving average.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, Ticket] = {}
        self._submitted: set[int] = set()
        self._running: set[int] = set()
        self._redo: dict[int, Ticket] = {}
        self._failed: list[UploadFuture] = []
        self._expected: list[UploadFuture] = []

    def add(self, ticket: Ticket) -> None:
        """Enter a ticket that was reserved."""
        with self._lock:
            self._open[ticket.number] = ticket

    def expect(self, ticket: Ticket) -> None:
        """Note that a ticket will be submitted, or fail, without more that the trainer does."""
        with self._lock:
            self._expected = [outcome for outcome in self._expected if not outcome.done()]
            if ticket.upload_completion not in self._expected:
                self._expected.append(ticket.upload_completion)

    def expected(self) -> list[UploadFuture]:
        """Return the outcomes that will come by themselves and are not there yet."""
        with self._lock:
            return [outcome for outcome in self._expected if not outcome.done()]

    def submit(self, ticket: Ticket) -> None:
        """Note that a ticket is filled; nothing if it has ended."""
        self.expect(ticket)
        with self._lock:
            if ticket.number in self._open:
                self._submitted.add(ticket.number)

    def withdraw(self, ticket: Ticket) -> bool:
        """Close a ticket that was not submitted; False if it was, or has ended."""
        with self._lock:
            if ticket.number in self._submitted:
                return False
            return self._open.pop(ticket.number, None) is not None

    def next_to_send(self) -> Ticket | None:
        """Return the first open ticket and count it as running, if it is submitted and not sent.

        Tickets go in the order of their numbers, so that the savers of all ranks meet for the same
        one: an open ticket that is not submitted holds up those after it.
        """
        with self._lock:
            for number in sorted(self._open):
                if number not in self._submitted:
                    return None
                if number not in self._running:
                    self._running.add(number)
                    return self._open[number]
        return None

    def open_ticket(self, number: int) -> Ticket | None:
        """Return the open ticket of that number."""
        with self._lock:
            return self._open.get(number)

    def running(self) -> list[Ticket]:
        """Return the tickets that the saver process has."""
        with self._lock:
            return [self._open[number] for number in sorted(self._running)]

    def end(self, ticket: Ticket, *, redo: bool = False) -> bool:
        """Close a ticket, to be redone or not; False if that was done before."""
        with self._lock:
            if self._open.pop(ticket.number, None) is None:
                return False
            self._submitted.discard(ticket.number)
            self._running.discard(ticket.number)
            if redo:
                self._redo[ticket.number] = ticket
            return True

    def to_redo(self) -> list[Ticket]:
        """Return the tickets that a new saver process must redo, in order."""
        with self._lock:
            return [ticket for _, ticket in sorted(self._redo.items())]

    def redone(self, number: int) -> Ticket | None:
        """Strike a ticket that was redone."""
        with self._lock:
            return self._redo.pop(number, None)

    def take_redo(self) -> list[Ticket]:
        """Strike all tickets that were to be redone, and return them."""
        with self._lock:
            taken, self._redo = list(self._redo.values()), {}
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
