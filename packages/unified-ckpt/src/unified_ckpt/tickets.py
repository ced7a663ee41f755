"""A snapshot on its way from the trainer to the saver process, and the future of its outcome.

report = ticket.upload_completion.result()  # raises what went wrong in the background
"""

import threading
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unified_ckpt.saving import SaveReport
from unified_ckpt.staging import StagingBuffer, StagingLayout

if TYPE_CHECKING:
    _ReportFuture = Future[SaveReport | None]
else:
    _ReportFuture = Future


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

    def add(self, ticket: Ticket) -> None:
        """Enter a ticket that was reserved."""
        with self._lock:
            self._open[ticket.number] = ticket

    def submit(self, ticket: Ticket) -> None:
        """Note that a ticket is filled."""
        with self._lock:
            self._submitted.add(ticket.number)

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

    def submitted(self) -> list[Ticket]:
        """Return the tickets that are filled and not ended."""
        with self._lock:
            return [self._open[number] for number in sorted(self._submitted)]

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

    def note_failure(self, outcome: UploadFuture) -> None:
        """Remember a failed save until somebody has seen its error."""
        with self._lock:
            self._failed.append(outcome)

    def take_unseen(self) -> BaseException | None:
        """Return the first error that nobody has seen, and count all as seen."""
        with self._lock:
            unseen = [outcome for outcome in self._failed if not outcome.seen]
            self._failed = []
        errors = [outcome.exception(0) for outcome in unseen]
        return errors[0] if errors else None
