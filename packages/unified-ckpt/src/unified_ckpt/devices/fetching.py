"""The bytes of tensors one after the other, those of devices copied ahead through pinned memory.

While a caller writes and sums one block, the devices fill the next two. What lies in plain CPU
memory is given as it lies there.

    with Fetcher() as fetcher:
        for buffer in fetcher.bytes_of(tensors):
            file.write(buffer)
"""

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from unified_ckpt.devices.copy_stream import CopyStream, Placed
from unified_ckpt.devices.ring import BLOCKS_AHEAD, HostBlock, HostRing
from unified_ckpt.geometry.tensors import bits_of, byte_view, contiguous_on_cpu


@dataclass(frozen=True, slots=True)
class _Filling:
    """A block that a device fills with tensors, or one tensor of the host without a block."""

    tensors: list[torch.Tensor]
    places: list[int]
    block: HostBlock | None
    event: torch.cuda.Event | None

    def buffers(self) -> Iterator[memoryview]:
        """Yield the bytes of each tensor, after a wait for the device."""
        if self.block is None or self.event is None:
            for tensor in self.tensors:
                yield byte_view(bits_of(contiguous_on_cpu(tensor)))
            return
        self.event.synchronize()
        for tensor, begin in zip(self.tensors, self.places, strict=True):
            yield self.block.bytes_at(begin, tensor.nbytes)


class Fetcher(AbstractContextManager["Fetcher"]):
    """A ring of pinned memory and a stream for each device; the devices are done when it ends.

    The trainer's streams are not waited for by the host, and wait for nothing.
    """

    def __init__(self) -> None:
        self._ring = HostRing()
        self._streams: dict[torch.device, CopyStream] = {}

    def __exit__(self, *_: object) -> None:
        for copy_stream in self._streams.values():
            copy_stream.event().synchronize()
        self._streams = {}

    def bytes_of(self, tensors: Iterable[torch.Tensor]) -> Iterator[memoryview]:
        """Yield the row-major bytes of each tensor, in order; they last while they are held."""
        ahead: deque[_Filling] = deque()
        blocks = 0
        for filling in self._fillings(tensors):
            ahead.append(filling)
            blocks += filling.block is not None
            while blocks > BLOCKS_AHEAD or (ahead and ahead[0].block is None):
                first = ahead.popleft()
                blocks -= first.block is not None
                yield from first.buffers()
        while ahead:
            yield from ahead.popleft().buffers()

    def _fillings(self, tensors: Iterable[torch.Tensor]) -> Iterator[_Filling]:
        group: list[torch.Tensor] = []
        places: list[int] = []
        block: HostBlock | None = None
        for tensor in tensors:
            begin = None
            if block is not None and tensor.is_cuda and tensor.device == group[0].device:
                begin = block.place(tensor.nbytes)
            if begin is None and block is not None:
                yield self._start(group, places, block)
                group, places, block = [], [], None
            if not tensor.is_cuda:
                yield _Filling([tensor], [], None, None)
                continue
            if begin is None:
                block = self._ring.take(tensor.nbytes)
                begin = block.place(tensor.nbytes) or 0
            group.append(tensor)
            places.append(begin)
        if block is not None:
            yield self._start(group, places, block)

    def _start(self, group: list[torch.Tensor], places: list[int], block: HostBlock) -> _Filling:
        device = group[0].device
        copy_stream = self._streams.get(device)
        if copy_stream is None:
            copy_stream = self._streams[device] = CopyStream(device)
        copy_stream.fetch(block.memory, map(Placed, group, places))
        return _Filling(group, places, block, copy_stream.event())
