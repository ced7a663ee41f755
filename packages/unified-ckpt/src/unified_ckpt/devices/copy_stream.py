"""One device's copies to and from host memory, on a stream of their own.

Invariant: it begins after what the current stream had done when it was first used since `begin`,
and the current stream never waits but in `join`. Many small tensors, and those that are not plain
memory, go through a buffer of fixed size on the device, so that one copy crosses for all of them,
and none needs memory of its own size there.

    copy_stream.fetch(memory, [Placed(weight, 0), Placed(bias, 4096)])  # uint8 host memory, pinned
    copy_stream.event().synchronize()
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from unified_ckpt.errors import SaveError
from unified_ckpt.geometry import split_box
from unified_ckpt.geometry.tensors import bits_of, narrow_box

ALIGNMENT_BYTES = 64  # of what is placed in host memory: whole cache lines, and any dtype
_PACK_BYTES = 4 << 20
_SMALL_BYTES = 256 << 10  # larger ones keep the bus busy by themselves


class Placed(NamedTuple):
    """A tensor of a device whose row-major bytes stand, or are to stand, from byte `begin`."""

    tensor: torch.Tensor
    begin: int


class CopyStream:
    """Copies of one device; used by one thread at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._begun = False
        self._buffer: torch.Tensor | None = None

    def begin(self) -> None:
        """Let the next copy wait for what the current stream has done by then."""
        self._begun = False

    def fetch(self, memory: torch.Tensor, placed: Iterable[Placed]) -> None:
        """Copy tensors of this device to `memory`, uint8 of the host; returns at once."""
        runs = self._prepare(placed)
        with torch.no_grad(), torch.cuda.stream(self._stream):
            for run in runs:
                target = memory[run[0].begin : _end(run[-1])]
                if _is_direct(run):
                    target.copy_(as_bytes(run[0].tensor), non_blocking=True)
                    continue
                buffer, views = self._packed(run)
                _copy_all(views, [each.tensor for each in run])
                target.copy_(buffer, non_blocking=True)

    def send(self, memory: torch.Tensor, placed: Iterable[Placed]) -> None:
        """Copy bytes of `memory`, uint8 of the host, to tensors of this device."""
        runs = self._prepare(placed)
        with torch.no_grad(), torch.cuda.stream(self._stream):
            for run in runs:
                source = memory[run[0].begin : _end(run[-1])]
                if _is_direct(run):
                    as_bytes(run[0].tensor).copy_(source, non_blocking=True)
                    continue
                buffer, views = self._packed(run)
                buffer.copy_(source, non_blocking=True)
                _copy_all([each.tensor for each in run], views)

    def event(self) -> torch.cuda.Event:
        """Return what tells when all copies until now are done; who waits for it sleeps."""
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)
        return event

    def join(self) -> torch.cuda.Event | None:
        """Let the current stream wait for the copies since `begin`; None if there are none."""
        if not self._begun:
            return None
        event = self.event()
        torch.cuda.current_stream(self._device).wait_event(event)
        return event

    def _prepare(self, placed: Iterable[Placed]) -> list[list[Placed]]:
        """Return what crosses in one copy each; the stream has waited where it must."""
        runs = list(_runs(placed))
        makes_buffer = self._buffer is None and not all(map(_is_direct, runs))
        if makes_buffer:  # of the current stream, which has waited for all copies when it is freed
            num_bytes = _PACK_BYTES + ALIGNMENT_BYTES
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        if runs and (makes_buffer or not self._begun):
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            self._begun = True
        return runs

    def _packed(self, run: Sequence[Placed]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the bytes of the device's buffer for a run, and the views of its tensors."""
        if self._buffer is None:  # _prepare makes it
            raise SaveError(f"{self._device}: no buffer was made to pack tensors in")
        begins_at = run[0].begin % ALIGNMENT_BYTES
        base = run[0].begin - begins_at
        views = []
        for tensor, begin in run:
            raw = self._buffer[begin - base : begin - base + tensor.nbytes]
            views.append(raw.view(tensor.dtype).view(tensor.shape))
        return self._buffer[begins_at : _end(run[-1]) - base], views


def is_plain_device_memory(tensor: torch.Tensor) -> bool:
    """Whether the tensor's row-major values are its device memory as it lies there."""
    return tensor.is_cuda and _is_plain(tensor)


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _is_direct(run: Sequence[Placed]) -> bool:
    return len(run) == 1 and _is_plain(run[0].tensor)


def _end(placed: Placed) -> int:
    return placed.begin + placed.tensor.nbytes


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View plain memory as its bytes; one element may have any stride, which torch cannot view."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy tensors to tensors, those of plain memory in one launch."""
    pairs = list(zip(targets, sources, strict=True))
    plain = [pair for pair in pairs if _is_plain(pair[0]) and _is_plain(pair[1])]
    if plain:
        torch._foreach_copy_([as_bytes(t) for t, _ in plain], [as_bytes(s) for _, s in plain])
    for target, source in pairs:
        if not (_is_plain(target) and _is_plain(source)):
            target.copy_(source)


def _runs(placed: Iterable[Placed]) -> Iterator[list[Placed]]:
    """Join what is small or not plain and lies together in host memory, to the buffer's size."""
    run: list[Placed] = []
    for each in placed:
        for piece in _pieces(each):
            large = _is_plain(piece.tensor) and piece.tensor.nbytes > _SMALL_BYTES
            if run and (
                large
                or piece.begin - _end(run[-1]) not in range(ALIGNMENT_BYTES)
                or _end(piece) - run[0].begin > _PACK_BYTES
            ):
                yield run
                run = []
            if large:
                yield [piece]
            else:
                run.append(piece)
    if run:
        yield run


def _pieces(placed: Placed) -> Iterator[Placed]:
    """Yield a tensor with torch's copyable dtypes; cut to the buffer's size if it is not plain."""
    tensor, begin = bits_of(placed.tensor.detach()), placed.begin
    if _is_plain(tensor) or tensor.nbytes <= _PACK_BYTES:
        if tensor.nbytes:
            yield Placed(tensor, begin)
        return
    for offset, shape in split_box(tuple(tensor.shape), tensor.element_size(), _PACK_BYTES):
        piece = narrow_box(tensor, offset, shape)
        yield Placed(piece, begin)
        begin += piece.nbytes
