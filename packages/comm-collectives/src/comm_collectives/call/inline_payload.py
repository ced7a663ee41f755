"""Rows that travel inside the control exchange of their call and need no exchange of their own.

A few bytes for each rank lie in the frames; more lies on pages, where a group has them. They are
inline only if those of every rank do, and each rank says where its rows for another one begin.

    offered = inline_rows(x, sent, num_words=1, state=state)
    counts = exchange_counts(call, [[n] for n in sent], inline=offered)
    if counts.inline is not None:
        y = counts.inline.rows(call, x, sent, received)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from comm_collectives.base import as_bytes, bytes_of, dense, joined, new_tensor, num_bytes
from comm_collectives.call.calls import Call
from comm_collectives.call.control import PAGE_BYTES
from comm_collectives.call.groups import GroupState
from comm_collectives.call.signature import INLINE_BYTES, Status
from comm_collectives.units import WORD_BYTES

_IN_FRAME = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class InlinePayload:
    """How the rows of this rank travel.

    Attributes:
        flags: for the control exchange.
        at: by rank, where its rows begin on the page, in bytes.
        parts: by rank, the rows in its frame; None if they are not there.
        page: the rows as flat uint8; None if they are not there.
    """

    flags: int
    at: tuple[int, ...]
    parts: list[bytes] | None = None
    page: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InlineRows:
    """Rows that came with a control exchange: where those of each rank begin, and its frame."""

    at: list[int]
    parts: list[bytes]

    def rows(
        self, call: Call, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> torch.Tensor:
        """Return them as [sum(received), ...], with dtype, row shape and device of `x`."""
        row_bytes = num_bytes(x.dtype, x.shape[1:])
        for observe in call.state.observers:
            observe(call.name, [n * row_bytes for n in sent])
        shape = (sum(received), *x.shape[1:])
        lengths = [n * row_bytes for n in received]
        if all(at == _IN_FRAME for at in self.at):
            pieces = [part[:length] for part, length in zip(self.parts, lengths, strict=True)]
            return joined(pieces, x.dtype, shape, x.device)
        y = new_tensor(shape, x.dtype, "cpu")
        targets = as_bytes(y).split(lengths)
        call.read(lambda pages: self._copy(targets, pages))
        return y.to(x.device)

    def _copy(self, targets: Sequence[torch.Tensor], pages: torch.Tensor) -> None:
        for target, at, part, page in zip(targets, self.at, self.parts, pages, strict=True):
            length = target.numel()
            if at != _IN_FRAME:
                target.copy_(page[at : at + length])
            elif length:
                target.copy_(torch.frombuffer(bytearray(part[:length]), dtype=torch.uint8))


def not_inline(state: GroupState) -> InlinePayload:
    """Return the payload of a rank whose rows have their own exchange, or that has none."""
    return InlinePayload(flags=Status.NOT_INLINE, at=(0,) * state.size)


def inline_rows(
    x: torch.Tensor, sent: Sequence[int], *, num_words: int, state: GroupState
) -> InlinePayload:
    """Say how the rows of `x` travel, of which rank r gets `sent[r]`, along with some words."""
    if not state.carries_inline(x.device):
        return not_inline(state)
    row_bytes = num_bytes(x.dtype, x.shape[1:])
    lengths = [n * row_bytes for n in sent]
    starts = tuple(accumulate(lengths[:-1], initial=0))
    if max(lengths) <= INLINE_BYTES - (num_words + 1) * WORD_BYTES:
        data = bytes_of(as_bytes(dense(x)))
        parts = [data[at : at + n] for at, n in zip(starts, lengths, strict=True)]
        return InlinePayload(flags=0, at=(_IN_FRAME,) * state.size, parts=parts)
    if fits_page(x.nbytes, state):
        return InlinePayload(flags=0, at=starts, page=as_bytes(dense(x)).cpu())
    return InlinePayload(
        flags=Status.NOT_INLINE | wants_pages(x.nbytes, state), at=(0,) * state.size
    )


def fits_page(num_bytes: int, state: GroupState) -> bool:
    """Whether a page of this group holds so much."""
    control = state.control
    return control is not None and num_bytes <= control.page_bytes


def wants_pages(num_bytes: int, state: GroupState) -> int:
    """Return the flag WANTS_PAGES if the group should try to get pages for so much, else 0."""
    return Status.WANTS_PAGES if num_bytes <= PAGE_BYTES and state.size > 1 else 0
