"""Activations in the host's memory between a forward and its backward.

    offload = ActivationOffload(model.parameters())
    with offload:
        loss = stage(x)             # copies of what is saved leave the device behind the forward
    print(offload.offloaded_bytes)
    loss.backward()                 # and come back, each when it is first asked for

Each storage is copied once, whole, however many tensors of it are saved; a storage that was changed
in place between two saves counts as another one. Left where they are: parameters (the given ones,
and leaves that require grad), tensors of less than `min_bytes`, and tensors that are not on a CUDA
device: on a CPU there is nowhere to go, and the context does nothing.

Copies out run on a stream of their own, from and to pinned memory, after what the forward's stream
has done so far; the device's memory is free for others once they are done. Copies back run on the
stream that asks first; others that use the same storage wait for the copy. A tensor must not be
changed in place after it is saved: as with any hooks on saved tensors, autograd does not notice.

Other contexts compose: `discard_outputs` goes inside this one; within `recompute` only what is kept
for its second forward is offloaded.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, final
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from moe_pipeline._torch_private import (
    saved_tensors_hooks_in_force,
    storage_address,
    version_of,
)
from moe_pipeline.errors import MoEValueError

_MIN_BYTES = 1 << 20


@final
class ActivationOffload:
    """A context around a forward, whose saved activations wait in the host's memory.

    May be entered again, for other microbatches; graphs of all of them may be alive.

    Args:
        parameters: never offloaded, nor are views of them; give those of the stage.
        min_bytes: storages of less stay where they are.
        max_bytes: storages that would bring `offloaded_bytes` above this stay where they are; None:
            no limit.

    Raises:
        ValueError: `min_bytes` below 1, or `max_bytes` below 0.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor] = (),
        *,
        min_bytes: int = _MIN_BYTES,
        max_bytes: int | None = None,
    ) -> None:
        if min_bytes < 1:
            raise MoEValueError(f"min_bytes={min_bytes} must be at least 1")
        if max_bytes is not None and max_bytes < 0:
            raise MoEValueError(f"max_bytes={max_bytes} must be at least 0, or None")
        self._parameters = tuple(parameters)
        self._min_bytes, self._max_bytes = min_bytes, max_bytes
        self._entered: list[saved_tensors_hooks] = []
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._counts = _Counts()

    @property
    def offloaded_bytes(self) -> int:
        """Bytes in the host's memory now: of graphs that wait for their backward."""
        return self._counts.alive_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes that were ever copied out."""
        return self._counts.total_bytes

    def __enter__(self) -> "ActivationOffload":
        kept = {storage_address(p.untyped_storage()) for p in self._parameters}
        hooks = _Hooks(self, kept)
        context = saved_tensors_hooks(hooks.pack, hooks.unpack)
        context.__enter__()
        self._entered.append(context)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._entered.pop().__exit__(kind, error, trace)

    def takes(self, tensor: Tensor) -> bool:
        """Whether a tensor of this device, layout and size is one to offload."""
        if tensor.device.type != "cuda" or tensor.layout != torch.strided:
            return False
        size = tensor.untyped_storage().nbytes()
        if size < self._min_bytes or (tensor.is_leaf and tensor.requires_grad):
            return False
        return self._max_bytes is None or self._counts.alive_bytes + size <= self._max_bytes

    def copy_out(self, storage: torch.UntypedStorage) -> "_Offloaded":
        """The storage's bytes, on their way to the host."""
        device = storage.device
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        source = _bytes_of(storage)
        host = torch.empty(source.shape, dtype=torch.uint8, pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            host.copy_(source, non_blocking=True)
            done = stream.record_event()
        # Its memory is not given to others before the copy is done.
        source.record_stream(stream)
        return _Offloaded(host, done, device, self._counts)


@dataclass(slots=True)
class _Counts:
    alive_bytes: int = 0
    total_bytes: int = 0


@final
class _Offloaded:
    """The bytes of a storage in the host's memory."""

    def __init__(
        self, host: Tensor, done: torch.cuda.Event, device: torch.device, counts: _Counts
    ) -> None:
        self._host, self._done, self._device, self._counts = host, done, device, counts
        self._back: Tensor | None = None
        self._is_back: torch.cuda.Event | None = None
        self._num_left = 0
        self.num_users = 0
        counts.alive_bytes += host.numel()
        counts.total_bytes += host.numel()

    def __del__(self) -> None:
        self._counts.alive_bytes -= self._host.numel()

    def storage(self) -> torch.UntypedStorage:
        """The bytes on the device again, in one copy for all users of a backward."""
        stream = torch.cuda.current_stream(self._device)
        if self._back is None or self._is_back is None:
            stream.wait_event(self._done)
            self._back = self._host.to(self._device, non_blocking=True)
            self._is_back = stream.record_event()
            self._num_left = self.num_users
        else:  # this user may have another stream than the first
            stream.wait_event(self._is_back)
            self._back.record_stream(stream)
        back, self._num_left = self._back.untyped_storage(), self._num_left - 1
        if self._num_left <= 0:
            self._back = None
        return back


@final
@dataclass(frozen=True, slots=True)
class _View:
    """A saved tensor without its memory."""

    offloaded: _Offloaded
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int | torch.SymInt


@final
class _Hooks:
    """Hooks on saved tensors for one forward."""

    def __init__(self, offload: ActivationOffload, kept: set[int]) -> None:
        self._offload = offload
        self._kept = kept
        self._outer = saved_tensors_hooks_in_force()
        # By address, and valid while that storage lives and is not changed.
        self._known: dict[
            int, tuple[ReferenceType[torch.UntypedStorage], int, ReferenceType[_Offloaded]]
        ] = {}

    def pack(self, tensor: Tensor) -> Any:
        """What is left of a tensor on the device; that itself, or what the hooks around make."""
        offloaded = self._offloaded(tensor)
        if offloaded is None:
            return tensor if self._outer is None else self._outer[0](tensor)
        offloaded.num_users += 1
        return _View(
            offloaded,
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
            tensor.storage_offset(),
        )

    def unpack(self, packed: Any) -> Tensor:
        """The reverse of `pack`."""
        if isinstance(packed, _View):
            storage = packed.offloaded.storage()
            flat = torch.empty(0, dtype=packed.dtype, device=storage.device)
            return flat.set_(storage, packed.offset, packed.size, packed.stride)
        value: Tensor = packed if self._outer is None else self._outer[1](packed)
        return value

    def _offloaded(self, tensor: Tensor) -> _Offloaded | None:
        # A conjugated or negated view says so outside of its memory.
        if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
            return None
        storage = tensor.untyped_storage()
        place = storage_address(storage)
        if place in self._kept:
            return None
        known, version, offloaded = self._known.get(place, (None, -1, None))
        if known is not None and known() is storage and version == version_of(tensor):
            there = None if offloaded is None else offloaded()
            if there is not None:
                return there
        if not self._offload.takes(tensor):
            return None
        there = self._offload.copy_out(storage)
        self._known[place] = ref(storage), version_of(tensor), ref(there)
        return there


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
