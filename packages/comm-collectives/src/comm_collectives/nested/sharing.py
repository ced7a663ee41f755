"""Which tensors of a value share memory, so that they share it on the receivers too.

Of each tensor only the bytes from its first to its last element, its span, are looked at. A tensor
is compact if its span is not larger than its elements together (`w`, `w.t()`, `w[2:5]`, an
expanded one), else it has gaps (`w[:, :3]`). The rule, for tensors of one storage:

1. Compact tensors travel as their span and keep their strides; those that overlap, as one piece.
2. So do those with gaps, if the piece is not larger than its tensors together, or if they lie
   inside a piece of compact ones.
3. Other tensors with gaps travel contiguous, each by itself; if several have the same place, shape,
   strides and dtype, once.

Sharing therefore never costs a byte more than sending the tensors one by one, and of a large
storage nothing travels but the pieces. Conjugated and negated views travel resolved, by themselves.

    cargo = find_cargo([w, w.t(), b])       # two items: the bytes of w, and b
    w2 = cargo.views[0].of(item)            # on the receiver
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import torch

from comm_collectives.base import as_bytes


class View(NamedTuple):
    """Tensor `number` as a part of item `base`, from `offset_bytes` on."""

    number: int
    base: int
    dtype: torch.dtype
    offset_bytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def of(self, item: torch.Tensor) -> torch.Tensor:
        """Return the view of a contiguous item; shares its memory."""
        span = _reach(self.shape, self.strides) * self.dtype.itemsize
        flat = as_bytes(item)[self.offset_bytes : self.offset_bytes + span]
        return flat.view(self.dtype).as_strided(self.shape, self.strides).detach()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cargo:
    """What has to travel. Items with a tensor's number are that tensor; others are bytes (uint8)
    of a storage, numbered from the number of tensors on, of which tensors are views."""

    items: dict[int, torch.Tensor]
    views: list[View]


class _Span(NamedTuple):
    start: int  # addresses
    stop: int
    number: int


def find_cargo(tensors: Sequence[torch.Tensor]) -> Cargo:
    """Find the pieces of memory that hold these dense tensors."""
    finder = _Finder(tensors)
    loose: dict[tuple[torch.device, int, int], list[_Span]] = {}
    for spans in _overlapping(_spans(tensors)):
        if len(spans) == 1 and tensors[spans[0].number].is_contiguous():
            continue  # the ordinary case: it travels as it is
        for span in spans:
            tensor = tensors[span.number]
            storage = tensor.untyped_storage()
            key = tensor.device, storage.data_ptr(), storage.nbytes()
            loose.setdefault(key, []).append(span)
    for candidates in loose.values():
        for spans in _overlapping(candidates):
            finder.take(spans)
    return Cargo(items=finder.items, views=finder.views)


@final
class _Finder:
    """Replaces tensors that overlap by what travels in their place."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._next = len(tensors)
        self.items = dict(enumerate(tensors))
        self.views: list[View] = []

    def take(self, spans: list[_Span]) -> None:
        """Decide upon spans of one storage that hang together."""
        if self._is_worth(spans):
            self._add_piece(spans)
            return
        compact = [span for span in spans if self._is_worth([span])]
        rest = [span for span in spans if not self._is_worth([span])]
        for piece in _overlapping(compact):
            start, stop = piece[0].start, max(span.stop for span in piece)
            inside = [span for span in rest if start <= span.start and span.stop <= stop]
            if inside:
                rest = [span for span in rest if span.start < start or stop < span.stop]
            self._add_piece(piece + inside)
        self._add_once(rest)

    def _is_worth(self, spans: Sequence[_Span]) -> bool:
        start, stop = self._bounds(spans)
        return stop - start <= sum(self._tensors[span.number].nbytes for span in spans)

    def _bounds(self, spans: Sequence[_Span]) -> tuple[int, int]:
        """First address, moved back until each tensor is aligned behind it, and the end."""
        base = self._tensors[spans[0].number].untyped_storage().data_ptr()
        start = min(span.start for span in spans)
        widest = max(self._tensors[span.number].element_size() for span in spans)
        return start - (start - base) % widest, max(span.stop for span in spans)

    def _add_piece(self, spans: Sequence[_Span]) -> None:
        first = self._tensors[spans[0].number]
        if len(spans) == 1 and first.is_contiguous():
            return
        start, stop = self._bounds(spans)
        storage = first.untyped_storage()
        flat = torch.empty(0, dtype=torch.uint8, device=first.device)
        self.items[self._next] = flat.set_(
            storage, start - storage.data_ptr(), (stop - start,), (1,)
        )
        for span in spans:
            del self.items[span.number]
            tensor = self._tensors[span.number]
            self._add_view(span.number, self._next, span.start - start, tensor.stride())
        self._next += 1

    def _add_once(self, spans: Sequence[_Span]) -> None:
        first_of: dict[object, int] = {}
        for span in spans:
            tensor = self._tensors[span.number]
            key = span.start, tensor.dtype, tensor.shape, tensor.stride()
            first = first_of.setdefault(key, span.number)
            if first != span.number:
                del self.items[span.number]
                self._add_view(span.number, first, 0, _contiguous(tensor.shape))

    def _add_view(self, number: int, base: int, offset_bytes: int, strides: Sequence[int]) -> None:
        tensor = self._tensors[number]
        where = offset_bytes, tuple(tensor.shape), tuple(strides)
        self.views.append(View(number, base, tensor.dtype, *where))


def _spans(tensors: Sequence[torch.Tensor]) -> Iterator[_Span]:
    for number, tensor in enumerate(tensors):
        if tensor.is_conj() or tensor.is_neg():
            continue
        start = tensor.data_ptr()
        if tensor.is_contiguous():
            size = tensor.nbytes
        else:
            size = _reach(tensor.shape, tensor.stride()) * tensor.element_size()
        if size:
            yield _Span(start, start + size, number)


def _overlapping(spans: Iterable[_Span]) -> Iterator[list[_Span]]:
    """Split spans into groups without a common byte; within one, they hang together."""
    group: list[_Span] = []
    stop = 0
    for span in sorted(spans):
        if group and span.start >= stop:
            yield group
            group = []
        group.append(span)
        stop = max(stop, span.stop)
    if group:
        yield group


def _reach(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Number of elements from the first to the last one, those in gaps included."""
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))


def _contiguous(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
