"""Moments and master weights in the host's memory, which visit the device to be updated.

They visit part by part, in two buffers in turn: while one part is updated the next one comes and
the last one goes, each on a stream of its own, from and to pinned memory. On a CPU, which has no
streams, the same copies are made one after the other.

Invariant: when `settle` has returned, the host's tensors hold what the last visit has left.

    states = HostStates(device, host="cpu")
    moments = states.zeros({"w": weight}, torch.float32)
    for here in states.visits([[moments["w"][:4]], [moments["w"][4:]]]):
        here[0].add_(1)
"""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import accumulate
from typing import final

import torch
from torch import Tensor

from unified_ckpt.devices import pin, unpin

_ALIGNMENT_BYTES = 256


@final
class HostStates:
    """Tensors of the host for the parameters of one device.

    Args:
        device: where updates are computed.
        host: where the tensors lie: "cpu", or "meta" for tensors without memory.
    """

    def __init__(self, device: torch.device, host: str) -> None:
        self._device, self._host = device, host
        self._streams: _Streams | None = None
        if device.type == "cuda":
            self._streams = _Streams(torch.cuda.Stream(device), torch.cuda.Stream(device))

    def zeros(self, likes: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        """Tensors of these shapes, in one block of pinned memory: exactly as large as they need,
        where torch's own allocator takes the next power of two for each.
        """
        unit = _ALIGNMENT_BYTES // dtype.itemsize
        sizes = [-(-like.numel() // unit) * unit for like in likes.values()]
        block = torch.zeros(sum(sizes), dtype=dtype, device=self._host)
        if self._streams is not None and block.numel():
            raw = block.view(torch.uint8)
            if pin(raw):  # and let go of when a job makes other states; at its end it has no need
                weakref.finalize(self, _let_go, raw, self._streams).atexit = False
        starts = accumulate(sizes, initial=0)
        return {
            name: block[start : start + like.numel()].view(like.shape)
            for (name, like), start in zip(likes.items(), starts, strict=False)
        }

    def visits(self, parts: Sequence[Sequence[Tensor]]) -> Iterator[list[Tensor]]:
        """Each part's tensors on the device in turn; what is written there comes back to the host.

        Args:
            parts: tensors of the host; of none of them two parts have the same bytes.
        """
        largest = max((_places(part)[-1] for part in parts), default=0)
        # Numbers of four bytes: a plan on tensors without memory has no bytes of its own.
        slots = [
            _Slot(torch.empty(largest // 4, dtype=torch.float32, device=self._device))
            for _ in parts[:2]
        ]
        if self._streams is not None:
            self._streams.loads.wait_stream(torch.cuda.current_stream(self._device))
            self._streams.loads.wait_stream(self._streams.stores)
        try:
            for part in parts[:1]:
                self._come(slots[0], part)
            for number, part in enumerate(parts):
                if number + 1 < len(parts):
                    self._come(slots[(number + 1) % 2], parts[number + 1])
                slot = slots[number % 2]
                if slot.come is not None:
                    torch.cuda.current_stream(self._device).wait_event(slot.come)
                yield slot.tensors
                self._go(slot, part)
        finally:
            # The buffers' memory is the next operation's as soon as this ends.
            if self._streams is not None:
                torch.cuda.current_stream(self._device).wait_stream(self._streams.loads)
                torch.cuda.current_stream(self._device).wait_stream(self._streams.stores)

    def _come(self, slot: "_Slot", part: Sequence[Tensor]) -> None:
        """Send a part to the device, as soon as what was there before has gone."""
        slot.tensors = [
            slot.memory[start // 4 : (start + _padded(tensor)) // 4]
            .view(tensor.dtype)[: tensor.numel()]
            .view(tensor.shape)
            for tensor, start in zip(part, _places(part), strict=False)
        ]
        with self._on("loads"):
            if self._streams is not None and slot.gone is not None:
                self._streams.loads.wait_event(slot.gone)
            for here, tensor in zip(slot.tensors, part, strict=True):
                here.copy_(tensor, non_blocking=True)
            if self._streams is not None:
                slot.come = self._streams.loads.record_event()

    def _go(self, slot: "_Slot", part: Sequence[Tensor]) -> None:
        """Send a part back, behind what the current stream has computed on it."""
        if self._streams is not None:
            self._streams.stores.wait_stream(torch.cuda.current_stream(self._device))
        with self._on("stores"):
            for here, tensor in zip(slot.tensors, part, strict=True):
                tensor.copy_(here, non_blocking=True)
            if self._streams is not None:
                slot.gone = self._streams.stores.record_event()

    def _on(self, name: str) -> AbstractContextManager[object]:
        if self._streams is None:
            return nullcontext()
        return torch.cuda.stream(getattr(self._streams, name))

    def settle(self) -> None:
        """Wait until the host's tensors may be read and written."""
        if self._streams is not None:
            self._streams.stores.synchronize()


@dataclass(frozen=True, slots=True)
class _Streams:
    loads: "torch.cuda.Stream"
    stores: "torch.cuda.Stream"


@dataclass(slots=True)
class _Slot:
    """A buffer of the device, the tensors in it, and when they have come and gone."""

    memory: Tensor
    tensors: list[Tensor] = field(default_factory=list)
    come: "torch.cuda.Event | None" = None
    gone: "torch.cuda.Event | None" = None


def _padded(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _places(part: Sequence[Tensor]) -> list[int]:
    """Where each tensor begins in a buffer, and where the last one ends, in bytes."""
    return list(accumulate((_padded(tensor) for tensor in part), initial=0))


def _let_go(memory: Tensor, streams: _Streams) -> None:
    for stream in (streams.loads, streams.stores):
        stream.synchronize()
    unpin(memory)
