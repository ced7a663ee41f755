"""Blocks of pinned host memory that are used again as soon as nobody holds bytes of them.

A block comes back by itself when the last view of its bytes is gone: written, summed, or sent. So
there are never more blocks than callers hold at a time, and taking one never waits.

    block = HostRing().take(100)
    begin = block.place(100)
    block.bytes_at(begin, 100)[:5] = b"bytes"
"""

from collections import deque

import torch

from unified_ckpt.devices.copy_stream import ALIGNMENT_BYTES
from unified_ckpt.devices.pinning import pinned_memory
from unified_ckpt.geometry import round_up
from unified_ckpt.geometry.tensors import byte_view

BLOCK_BYTES = 16 << 20
BLOCKS_AHEAD = 2  # that devices fill or empty while one is written or read


class HostBlock:
    """Host memory that is filled from its first byte on."""

    def __init__(self, memory: torch.Tensor, ring: "deque[torch.Tensor]") -> None:
        self.memory = memory
        self._ring = ring
        self._used = 0

    def place(self, num_bytes: int) -> int | None:
        """Take the next bytes; return where they begin, None if the block has no room for them."""
        begin = round_up(self._used, ALIGNMENT_BYTES)
        if begin + num_bytes > self.memory.numel():
            return None
        self._used = begin + num_bytes
        return begin

    def bytes_at(self, begin: int, num_bytes: int) -> memoryview:
        """Return bytes of the block, which is not used again while they are held."""
        return byte_view(self.memory[begin : begin + num_bytes], owner=self)

    def __del__(self) -> None:
        self._ring.append(self.memory)


class HostRing:
    """Makes a block when all others are in use."""

    def __init__(self) -> None:
        self._free: deque[torch.Tensor] = deque()

    def take(self, num_bytes: int) -> HostBlock:
        """Return a block of at least that size."""
        while self._free:
            memory = self._free.popleft()
            if memory.numel() >= num_bytes:
                return HostBlock(memory, self._free)
        return HostBlock(pinned_memory(max(num_bytes, BLOCK_BYTES)), self._free)
