"""Where the ranks of a group tell each other what they are about to do.

Two places: a page of shared memory if all ranks are on one host (found out by trying, once per
group), else one small all-to-all. Frames have one size, whatever the call, so that ranks in
different calls still understand each other.

    met = meeting.meet(head.pack(), None, waiter)     # collective; one frame of every rank
    met.heads[2], met.parts[2]                        # what rank 2 told all, and told this rank
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, final

import torch

from comm_collectives.base import bytes_of
from comm_collectives.base.transport import Pending, Transport
from comm_collectives.call.control.mailbox import Arrival, Board
from comm_collectives.call.control.inline_pages import Sheets
from comm_collectives.call.signature import HEAD_BYTES, PART_BYTES
from comm_collectives.errors import CommError

T = TypeVar("T")

TEXT_BYTES = 1536
_FRAME_BYTES = HEAD_BYTES + PART_BYTES
_JOIN_BYTES = 258
_LENGTH_BYTES = 2


@dataclass(frozen=True, slots=True)
class Met:
    """The frames of all ranks: their heads, and the parts meant for this rank."""

    heads: list[bytes]
    parts: list[bytes]
    all_equal: bool


class Waiter(Protocol):
    """The call on whose behalf a meeting waits."""

    @property
    def limit_s(self) -> float:
        """How long to wait for the others."""

    def run(self, start: Callable[[], Pending | None], *, on_cpu: bool) -> None:
        """Start a transfer and wait for it."""

    def not_all_here(self, arrival: Arrival) -> Exception:
        """Return the error for ranks that did not come."""


class Meeting(ABC):
    """Exchange of frames, and of sheets where there are any. Every method is collective."""

    __slots__ = ()

    @abstractmethod
    def meet(
        self,
        head: bytes,
        parts: Sequence[bytes] | None,
        waiter: Waiter,
        sheet: torch.Tensor | None = None,
    ) -> Met:
        """Give each rank the head and its part, and return theirs; show all of them the sheet.

        A sheet is flat uint8 on the host, of at most `sheet_bytes`.
        """

    @property
    def sheet_bytes(self) -> int:
        """How much a rank can show all others; 0 where nothing, the same on every rank."""
        return 0

    @abstractmethod
    def open_sheets(self, rank: int, transport: Transport, waiter: Waiter) -> None:
        """Make sheets if that is possible here; only the first time does something."""

    def read(self, take: Callable[[torch.Tensor], T], waiter: Waiter) -> T:
        """Return what `take` makes of the sheets that all showed in the last meeting.

        They are [ranks, sheet_bytes] uint8, and are written over later: copy what you need.
        """
        raise CommError("this group has no sheets to read; look at sheet_bytes first")

    @abstractmethod
    def tell(self, text: bytes, waiter: Waiter) -> list[bytes]:
        """Exchange longer texts (cut at TEXT_BYTES), after the heads were found to differ."""


@final
class WireMeeting(Meeting):
    """Frames travel as one all-to-all of the group's own transport."""

    __slots__ = ("_device", "_size", "_transport")

    def __init__(self, transport: Transport, size: int, device: str) -> None:
        self._transport, self._size, self._device = transport, size, device

    def meet(
        self,
        head: bytes,
        parts: Sequence[bytes] | None,
        waiter: Waiter,
        sheet: torch.Tensor | None = None,
    ) -> Met:
        """Swap frames of 512 bytes."""
        given = [b""] * self._size if parts is None else parts
        frames = self._swap([(head + part).ljust(_FRAME_BYTES, b"\0") for part in given], waiter)
        heads = [frame[:HEAD_BYTES] for frame in frames]
        padded = head.ljust(HEAD_BYTES, b"\0")
        return Met(
            heads=heads,
            parts=[frame[HEAD_BYTES:] for frame in frames],
            all_equal=all(theirs == padded for theirs in heads),
        )

    def open_sheets(self, rank: int, transport: Transport, waiter: Waiter) -> None:
        """Without shared memory there are none."""

    def tell(self, text: bytes, waiter: Waiter) -> list[bytes]:
        """Swap texts in one exchange."""
        padded = text[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")
        return [told.rstrip(b"\0") for told in self._swap([padded] * self._size, waiter)]

    def _swap(self, frames: Sequence[bytes], waiter: Waiter) -> list[bytes]:
        width = len(frames[0])
        sent = torch.frombuffer(bytearray(b"".join(frames)), dtype=torch.uint8).to(self._device)
        received = torch.empty_like(sent)
        splits = [width] * self._size
        waiter.run(
            lambda: self._transport.exchange(received, sent, splits, splits),
            on_cpu=self._device == "cpu",
        )
        data = bytes_of(received)
        return [data[at : at + width] for at in range(0, len(data), width)]


@final
class BoardMeeting(Meeting):
    """Frames lie in shared memory; `board` also tells who is dead and where everybody was last."""

    __slots__ = ("_number", "_sheets", "_size", "_tried", "board")

    def __init__(self, board: Board, size: int, sheets: Sheets | None = None) -> None:
        self.board, self._size = board, size
        self._sheets, self._tried = sheets, sheets is not None
        self._number = 0

    @property
    def sheet_bytes(self) -> int:
        """See Meeting."""
        return 0 if self._sheets is None else self._sheets.sheet_bytes

    def open_sheets(self, rank: int, transport: Transport, waiter: Waiter) -> None:
        """See Meeting."""
        if not self._tried:
            self._tried = True
            self._sheets = Sheets.open(rank, self._size, _all_gather(transport, self._size, waiter))

    def read(self, take: Callable[[torch.Tensor], T], waiter: Waiter) -> T:
        """See Meeting."""
        if self._sheets is None:
            return super().read(take, waiter)
        taken = take(self._sheets.of(self._number))
        gone_on = self.board.overwritten(self._number)
        if gone_on:
            raise waiter.not_all_here(Arrival(missing=(), dead=(), withdrawn=gone_on))
        return taken

    def meet(
        self,
        head: bytes,
        parts: Sequence[bytes] | None,
        waiter: Waiter,
        sheet: torch.Tensor | None = None,
    ) -> Met:
        """Post the frame, wait for the others, and read theirs only if they differ."""
        number = self._arrive(head, parts, waiter, sheet)
        received = self.board.parts(number) if parts is not None else []
        if self.board.all_equal(number, head):
            return Met(heads=[head] * self._size, parts=received, all_equal=True)
        if parts is None:
            received = self.board.parts(number)
        return Met(heads=self._heads(number, waiter), parts=received, all_equal=False)

    def tell(self, text: bytes, waiter: Waiter) -> list[bytes]:
        """Post texts head by head."""
        told = [b""] * self._size
        for at in range(0, TEXT_BYTES, HEAD_BYTES):
            number = self._arrive(text[at : at + HEAD_BYTES], None, waiter)
            told = [a + b for a, b in zip(told, self._heads(number, waiter), strict=True)]
        return [text.rstrip(b"\0") for text in told]

    def ahead(self) -> list[bytes]:
        """Return the heads of ranks that are already in the next meeting."""
        return [head for number, head in self.board.last_posted() if number == self._number + 1]

    def _heads(self, number: int, waiter: Waiter) -> list[bytes]:
        """The heads of a meeting, if no rank has gone on and overwritten its own."""
        heads = self.board.commons(number)
        gone_on = tuple(rank for rank, head in enumerate(heads) if not head)
        if gone_on:
            raise waiter.not_all_here(Arrival(missing=(), dead=(), withdrawn=gone_on))
        return heads

    def _arrive(
        self,
        head: bytes,
        parts: Sequence[bytes] | None,
        waiter: Waiter,
        sheet: torch.Tensor | None = None,
    ) -> int:
        self._number += 1
        number, sheets = self._number, self._sheets
        if sheet is None or sheets is None:
            self.board.post(number, head, parts)
        else:
            self.board.post(number, head, parts, beside=lambda: sheets.show(number, sheet))
        arrival = self.board.wait(number, waiter.limit_s)
        if not arrival.complete:
            arrival = self.board.withdraw(number)
        if not arrival.complete:
            raise waiter.not_all_here(arrival)
        return number


def open_meeting(
    transport: Transport, rank: int, size: int, device: str, waiter: Waiter
) -> Meeting:
    """Find out where this group meets. Collective, once per group."""
    if transport.may_share_memory and device == "cpu":
        board = Board.open(rank, size, _all_gather(transport, size, waiter))
        if board is not None:
            return BoardMeeting(board, size)
    return WireMeeting(transport, size, device)


def _all_gather(transport: Transport, size: int, waiter: Waiter) -> Callable[[bytes], list[bytes]]:
    """Return a function that hands a short text of each rank to all, by the transport."""

    def all_gather(text: bytes) -> list[bytes]:
        # With its length ahead, since a text may end in zeros.
        message = len(text).to_bytes(_LENGTH_BYTES, "little") + text
        width = _JOIN_BYTES
        sent = torch.frombuffer(bytearray(message.ljust(width, b"\0")), dtype=torch.uint8)
        received = torch.empty(width * size, dtype=torch.uint8, device="cpu")
        waiter.run(lambda: transport.all_gather(received, sent), on_cpu=True)
        data = bytes_of(received)
        return [_without_length(data[at : at + width]) for at in range(0, len(data), width)]

    return all_gather


def _without_length(message: bytes) -> bytes:
    length = int.from_bytes(message[:_LENGTH_BYTES], "little")
    return message[_LENGTH_BYTES : _LENGTH_BYTES + length]
