"""Memory for rows in transit, kept from call to call.

A fresh buffer of a megabyte costs more in page faults than its bytes cost to move over a local
connection. Rows on the wire live only inside one call, so a group keeps the few buffers that its
calls need at a time. On accelerators torch's allocator does this already, and nothing is kept.

Invariant: a buffer is either in the pool or with one caller. A caller whose transfer failed does
not return it, because the backend may still write into it.

    scratch = pool.take((1024, 256), torch.float32, torch.device("cpu"))
    ...                              # use scratch.rows
    pool.give_back(scratch)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch

from comm_collectives.base import from_bytes, num_bytes

_KEPT = 2  # one for what is sent and one for what is received
_SPARE = 8  # a new buffer is an eighth larger than asked, since routed rows vary from call to call


@dataclass(frozen=True, slots=True, kw_only=True)
class Scratch:
    """Uninitialised rows, and the buffer that they are the beginning of."""

    rows: torch.Tensor
    buffer: torch.Tensor


@final
class ScratchPool:
    """At most two host buffers, each as large as the largest call so far needed."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []

    def take(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Scratch:
        """Return uninitialised rows [*shape]; from the pool if a buffer there is large enough."""
        needed = num_bytes(dtype, shape)
        buffer = self._pop(needed) if device.type == "cpu" else None
        if buffer is None:
            size = needed + needed // _SPARE if device.type == "cpu" else needed
            buffer = torch.empty(size, dtype=torch.uint8, device=device)
        return Scratch(rows=from_bytes(buffer[:needed], dtype, shape), buffer=buffer)

    def give_back(self, scratch: Scratch) -> None:
        """Return rows that nobody reads or writes any more."""
        if scratch.buffer.device.type == "cpu" and len(self._free) < _KEPT:
            self._free.append(scratch.buffer)

    def _pop(self, needed: int) -> torch.Tensor | None:
        while True:
            try:
                # One operation, so that two threads never get the same buffer.
                buffer = self._free.pop()
            except IndexError:
                return None
            if buffer.numel() >= needed:
                return buffer
