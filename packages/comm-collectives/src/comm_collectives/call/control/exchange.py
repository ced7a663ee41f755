"""Where the ranks of a group tell each other what they are about to do.

Two places: a page of shared memory if all ranks are on one host (found out by trying, once per
group), else one small all-to-all. Frames have one size, whatever the call, so that ranks in
different calls still understand each other.

    met = control exchange.meet(head.pack(), None, waiter)     # collective; one frame of every rank
    met.heads[2], met.parts[2]                        # what rank 2 told all, and told this rank
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, final

import torch

from comm_collectives.base import bytes_of
from comm_collectives.base.transport import Pending, Transport
from comm_collectives.call.control.inline_pages import InlinePages
from comm_collectives.call.control.mailbox import Arrival, SharedMailbox
from comm_collectives.call.signature import INLINE_BYTES, SIGNATURE_BYTES
from comm_collectives.errors import CommError

T = TypeVar("T")

TEXT_BYTES = 1536
_FRAME_BYTES = SIGNATURE_BYTES + INLINE_BYTES
_JOIN_BYTES = 258
_LENGTH_BYTES = 2


@dataclass(frozen=True, slots=True)
class Exchanged:
    """The frames of all ranks: their heads, and the parts meant for this rank."""

    heads: list[bytes]
    parts: list[bytes]
    all_equal: bool


class Waiter(Protocol):
    """The call on whose behalf a control exchange waits."""

    @property
    def limit_s(self) -> float:
        """How long to wait for the others."""

    def run(self, start: Callable[[], Pending | None], *, on_cpu: bool) -> None:
        """Start a transfer and wait for it."""

    def not_all_here(self, arrival: Arrival) -> Exception:
        """Return the error for ranks that did not come."""


class ControlExchange(ABC):
    """Exchange of frames, and of pages where there are any. Every method is collective."""

    @staticmethod
    def open(
        transport: Transport, rank: int, size: int, device: str, waiter: Waiter
    ) -> "ControlExchange":
        """Find out where this group meets. Once per group."""
        if transport.may_share_memory and device == "cpu":
            mailbox = SharedMailbox.open(rank, size, _text_gather(transport, size, waiter))
            if mailbox is not None:
                return MailboxExchange(mailbox, size)
        return WireExchange(transport, size, device)

    @abstractmethod
    def meet(
        self,
        head: bytes,
        parts: Sequence[bytes] | None,
        waiter: Waiter,
        page: torch.Tensor | None = None,
    ) -> Exchanged:
        """Give each rank the head and its part, and return theirs; show all of them the page.

        A page is flat uint8 on the host, of at most `page_bytes`.
        """

    @property
    def page_bytes(self) -> int:
        """How much a rank can show all others; 0 where nothing, the same on every rank."""
        return 0

    @abstractmethod
    def open_pages(self, rank: int, transport: Transport, waiter: Waiter) -> None:
        """Make pages if that is possible here; only the first time does something."""

    def read(self, take: Callable[[torch.Tensor], T], waiter: Waiter) -> T:
        """Return what `take` makes of the pages that all showed in the last control exchange.

        They are [ranks, sheet_bytes] uint8, and are written over later: copy what you need.
        """
        raise CommError("this group has no pages to read; look at sheet_bytes first")

    @abstractmethod
    def tell(self, text: bytes, waiter: Waiter) -> list[bytes]:
        """Exchange longer texts (cut at TEXT_BYTES), after the heads were found to differ."""


@final
class WireExchange(ControlExchange):
    """Frames travel as one all-to-all of the group's own transport."""

    def __init__(self, transport: Transport, size: int, device: str) -> None:
        self._transport, self._size, self._device = transport, size, device

    def meet(
        self,
        head: bytes,
        parts: Sequence[bytes] | None,
        waiter: Waiter,
        page: torch.Tensor | None = None,
    ) -> Exchanged:
        """Swap frames of 512 bytes."""
        given = [b""] * self._size if parts is None else parts
        frames = self._swap([(head + part).ljust(_FRAME_BYTES, b"\0") for part in given], waiter)
        heads = [frame[:SIGNATURE_BYTES] for frame in frames]
        padded = head.ljust(SIGNATURE_BYTES, b"\0")
        return Exchanged(
            heads=heads,
            parts=[frame[SIGNATURE_BYTES:] for frame in frames],
            all_equal=all(theirs == padded for theirs in heads),
        )

    def open_pages(self, rank: int, transport: Transport, waiter: Waiter) -> None:
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
class MailboxExchange(ControlExchange):
    """Frames lie in shared memory; `mailbox` also knows who is dead and where all were last."""

    def __init__(self, mailbox: SharedMailbox, size: int, pages: InlinePages | None = None) -> None:
        self.mailbox, self._size = mailbox, size
        self._pages, self._tried = pages, pages is not None
        self._number = 0

    @property
    def page_bytes(self) -> int:
        """See Meeting."""
        return 0 if self._pages is None else self._pages.page_bytes

    def open_pages(self, rank: int, transport: Transport, waiter: Waiter) -> None:
        """See Meeting."""
        if not self._tried:
            self._tried = True
            self._pages = InlinePages.open(
                rank, self._size, _text_gather(transport, self._size, waiter)
            )

    def read(self, take: Callable[[torch.Tensor], T], waiter: Waiter) -> T:
        """See Meeting."""
        if self._pages is None:
            return super().read(take, waiter)
        taken = take(self._pages.of(self._number))
        gone_on = self.mailbox.overwritten(self._number)
        if gone_on:
            raise waiter.not_all_here(Arrival(missing=(), dead=(), withdrawn=gone_on))
        return taken

    def meet(
        self,
        head: bytes,
        parts: Sequence[bytes] | None,
        waiter: Waiter,
        page: torch.Tensor | None = None,
    ) -> Exchanged:
        """Post the frame, wait for the others, and read theirs only if they differ."""
        number = self._arrive(head, parts, waiter, page)
        received = self.mailbox.parts(number) if parts is not None else []
        if self.mailbox.all_equal(number, head):
            return Exchanged(heads=[head] * self._size, parts=received, all_equal=True)
        if parts is None:
            received = self.mailbox.parts(number)
        return Exchanged(heads=self._heads(number, waiter), parts=received, all_equal=False)

    def tell(self, text: bytes, waiter: Waiter) -> list[bytes]:
        """Post texts head by head."""
        told = [b""] * self._size
        for at in range(0, TEXT_BYTES, SIGNATURE_BYTES):
            number = self._arrive(text[at : at + SIGNATURE_BYTES], None, waiter)
            told = [a + b for a, b in zip(told, self._heads(number, waiter), strict=True)]
        return [text.rstrip(b"\0") for text in told]

    def ahead(self) -> list[bytes]:
        """Return the heads of ranks that are already in the next control exchange."""
        return [head for number, head in self.mailbox.last_posted() if number == self._number + 1]

    def _heads(self, number: int, waiter: Waiter) -> list[bytes]:
        """The heads of a control exchange, if no rank has gone on and overwritten its own."""
        heads = self.mailbox.commons(number)
        gone_on = tuple(rank for rank, head in enumerate(heads) if not head)
        if gone_on:
            raise waiter.not_all_here(Arrival(missing=(), dead=(), withdrawn=gone_on))
        return heads

    def _arrive(
        self,
        head: bytes,
        parts: Sequence[bytes] | None,
        waiter: Waiter,
        page: torch.Tensor | None = None,
    ) -> int:
        self._number += 1
        number, pages = self._number, self._pages
        if page is None or pages is None:
            self.mailbox.post(number, head, parts)
        else:
            self.mailbox.post(number, head, parts, beside=lambda: pages.show(number, page))
        arrival = self.mailbox.wait(number, waiter.limit_s)
        if not arrival.complete:
            arrival = self.mailbox.withdraw(number)
        if not arrival.complete:
            raise waiter.not_all_here(arrival)
        return number


def _text_gather(transport: Transport, size: int, waiter: Waiter) -> Callable[[bytes], list[bytes]]:
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
