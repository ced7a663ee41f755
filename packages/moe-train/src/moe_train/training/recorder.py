"""Record which storages a step allocates and frees, as a trace that gpu-alloc replays.

Works on any device, without CUDA: every operator's outputs are looked at, and a storage counts as
freed when torch drops it. Memory that an operator takes and returns inside itself is not seen.

    with record_allocations() as events:
        train_step()
    replay(events, AllocatorConfig())
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import count

import torch
from torch import Tensor

from gpu_alloc import TraceEvent
from moe_train._torch_private import OutputsMode, storage_id


@contextmanager
def record_allocations() -> Iterator[list[TraceEvent]]:
    """A context in which allocations and frees of tensor storages are added to the list."""
    events: list[TraceEvent] = []
    live: dict[int, weakref.finalize[..., torch.UntypedStorage]] = {}
    blocks = count()

    def saw(tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            key, storage = storage_id(tensor), tensor.untyped_storage()
            if key not in live and storage.nbytes():
                block, size_bytes = next(blocks), storage.nbytes()
                events.append(TraceEvent(action="alloc", block_id=block, size_bytes=size_bytes))
                live[key] = weakref.finalize(storage, freed, key, block, size_bytes)

    def freed(key: int, block: int, size_bytes: int) -> None:
        del live[key]
        events.append(TraceEvent(action="free", block_id=block, size_bytes=size_bytes))

    with OutputsMode(saw):
        yield events
    for finalizer in live.values():
        finalizer.detach()
