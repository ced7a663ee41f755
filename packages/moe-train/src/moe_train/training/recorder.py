"""Record which storages a step allocates and frees, as a trace that gpu-alloc replays.

Works on any device, without CUDA: every operator's outputs are looked at, and a storage counts as
freed when torch drops it. Memory that an operator takes and returns inside itself is not seen.

    with AllocationRecorder() as recorder:
        train_step()
    recorder.events
"""

import weakref
from collections.abc import Iterable
from types import TracebackType

import torch
from torch import Tensor

from gpu_alloc import TraceEvent
from moe_train._torch_private import OutputsMode, storage_id


class AllocationRecorder:
    """A context in which allocations and frees of tensor storages are recorded in `events`."""

    def __init__(self) -> None:
        self.events: list[TraceEvent] = []
        self._live: dict[int, weakref.finalize[..., torch.UntypedStorage]] = {}
        self._next_id = 0
        self._mode = OutputsMode(self.saw)

    def __enter__(self) -> "AllocationRecorder":
        self._mode.__enter__()  # type: ignore[no-untyped-call]  # torch's class has no types
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._mode.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]  # torch's class has no types
        for finalizer in self._live.values():
            finalizer.detach()

    def saw(self, tensors: Iterable[Tensor]) -> None:
        """Record the storages of `tensors` that are new."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage_id(tensor)
            if key in self._live or storage.nbytes() == 0:
                continue
            block = self._next_id
            self._next_id += 1
            self.events.append(
                TraceEvent(action="alloc", block_id=block, size_bytes=storage.nbytes())
            )
            self._live[key] = weakref.finalize(storage, self._freed, key, block, storage.nbytes())

    def _freed(self, key: int, block: int, size_bytes: int) -> None:
        del self._live[key]
        self.events.append(TraceEvent(action="free", block_id=block, size_bytes=size_bytes))
