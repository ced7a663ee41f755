"""Memory for rows in transit, kept from call to call.

A fresh buffer of a megabyte costs more in page faults than its bytes cost to move over a local
connection. Rows on the wire live only inside one call, so a group keeps the few buffers that its
calls need at a time. On accelerators torch's allocator does this already, and nothing is kept.

Invariant: a buffer is either in the pool or with one caller. A caller whose transfer failed keeps
it, because the backend may still write into it.

    with pool.lease(torch.device("cpu")) as lease:
        rows = lease.take((1024, 256), torch.float32)         # until the block ends
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import final

import torch

from comm_collectives.base import from_bytes, num_bytes

_KEPT = 2  # one for what is sent and one for what is received
_SPARE = 8  # a new buffer is an eighth larger than asked, since routed rows vary from call to call


@final
class ScratchPool:
    """At most two host buffers, each as large as the largest call so far needed."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []

    def lease(self, device: torch.device) -> "Lease":
        """Return a block in which rows on a device are taken, and after which they are free."""
        return Lease(self._free, device)


@final
class Lease(AbstractContextManager["Lease"]):
    """Rows that are taken inside the block; free for others when it ends without an exception."""

    def __init__(self, free: list[torch.Tensor], device: torch.device) -> None:
        self._free, self._device = free, device
        self._taken: list[torch.Tensor] = []

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialised rows [*shape]; from the pool if a buffer there is large enough."""
        needed, is_kept = num_bytes(dtype, shape), self._device.type == "cpu"
        buffer = self._pop(needed) if is_kept else None
        if buffer is None:
            size = needed + needed // _SPARE if is_kept else needed
            buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
        if is_kept:
            self._taken.append(buffer)
        return from_bytes(buffer[:needed], dtype, shape)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._free.extend(self._taken[: max(0, _KEPT - len(self._free))])

    def _pop(self, needed: int) -> torch.Tensor | None:
        while True:
            try:
                # One operation, so that two threads never get the same buffer.
                buffer = self._free.pop()
            except IndexError:
                return None
            if buffer.numel() >= needed:
                return buffer
