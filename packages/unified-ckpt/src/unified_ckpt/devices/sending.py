"""Bytes that are read into pinned memory and go on to tensors of devices while more are read.

with Sender() as sender:
    buffer = sender.place(weight)  # None: send first, the block is full
    file.readinto(buffer)
    sender.send()
"""

from collections import deque
from contextlib import AbstractContextManager

import torch

from unified_ckpt.devices.copy_stream import CopyStream, Placed
from unified_ckpt.devices.ring import BLOCKS_AHEAD, HostBlock, HostRing


class Sender(AbstractContextManager["Sender"]):
    """A ring of pinned memory and a stream for each device; when it ends, current streams wait."""

    def __init__(self) -> None:
        self._ring = HostRing()
        self._streams: dict[torch.device, CopyStream] = {}
        self._block: HostBlock | None = None
        self._placed: dict[torch.device, list[Placed]] = {}
        self._sent: deque[tuple[list[torch.cuda.Event], HostBlock]] = deque()

    def __exit__(self, *_: object) -> None:
        for copy_stream in self._streams.values():
            copy_stream.join()

    def place(self, tensor: torch.Tensor) -> memoryview | None:
        """Return memory for the row-major bytes of a device's tensor; None before a `send`."""
        if self._block is None:
            self._block = self._ring.take(tensor.nbytes)
        begin = self._block.place(tensor.nbytes)
        if begin is None:
            return None
        self._placed.setdefault(tensor.device, []).append(Placed(tensor, begin))
        return self._block.bytes_at(begin, tensor.nbytes)

    def send(self) -> None:
        """Send what was placed, whose bytes are there now; returns while devices still copy."""
        if self._block is None:
            return
        events = []
        for device, placed in self._placed.items():
            copy_stream = self._streams.get(device)
            if copy_stream is None:
                copy_stream = self._streams[device] = CopyStream(device)
            copy_stream.send(self._block.memory, placed)
            events.append(copy_stream.event())
        self._sent.append((events, self._block))
        self._block, self._placed = None, {}
        while len(self._sent) > BLOCKS_AHEAD:
            for event in self._sent.popleft()[0]:
                event.synchronize()
