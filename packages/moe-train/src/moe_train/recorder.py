"""Record which storages a step allocates and frees, as a trace that gpu-alloc replays.

Works on any device, without CUDA: every operator's outputs are looked at, and a storage counts as
freed when torch drops it. Memory that an operator takes and returns inside itself is not seen.

    with AllocationRecorder() as recorder:
        train_step()
    recorder.events
"""

import weakref
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gpu_alloc import TraceEvent


class AllocationRecorder:
    """A context in which allocations and frees of tensor storages are recorded in `events`."""

    def __init__(self) -> None:
        self.events: list[TraceEvent] = []
        self._live: dict[int, weakref.finalize[..., torch.UntypedStorage]] = {}
        self._next_id = 0
        self._mode = _OutputsMode(self.saw)

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
            key = storage._cdata
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


class _OutputsMode(TorchDispatchMode):
    """Hands the tensors that each operator returns to a function."""

    def __init__(self, saw: Callable[[Iterable[Tensor]], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's class has no types
        self._saw = saw

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # An output may be a view of memory that was there before the recording.
        given = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        self._saw(t for t in _tensors(result) if t.untyped_storage()._cdata not in given)
        return result


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
