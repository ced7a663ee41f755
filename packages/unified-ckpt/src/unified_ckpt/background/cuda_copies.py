"""Copies from CUDA devices into pinned staging memory, on streams of their own.

The streams wait for what the trainer's streams had done when the snapshot began, and the trainer's
streams wait for the copies only when the tensors are about to change.

    copies.start()
    copies.issue(chunk, sources, views)
    wait = copies.finish()  # a function that returns when the copies are done; None without any
"""

from collections.abc import Callable, Sequence

import torch

from unified_ckpt.background.offload_plan import ByteSlice
from unified_ckpt.devices import CopyStream, Placed, as_bytes, is_plain_device_memory
from unified_ckpt.errors import SaveError


class DeviceCopies:
    """The devices' part of one snapshot after the other; makes no stream without device tensors."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, CopyStream] = {}

    def start(self) -> None:
        """Begin a snapshot."""
        for copy_stream in self._streams.values():
            copy_stream.begin()

    def issue(
        self,
        chunk: Sequence[ByteSlice],
        sources: Sequence[torch.Tensor],
        views: Sequence[torch.Tensor],
    ) -> None:
        """Enqueue the copies of the device tensors among the slices; views are of one memory."""
        placed: dict[torch.device, list[Placed]] = {}
        for index, begin, end in chunk:
            source, view = sources[index].detach(), views[index]
            if source.is_cpu:
                continue
            if not source.is_cuda:
                raise SaveError(
                    f"a tensor on the device {source.device}; only CPU and CUDA can be staged"
                )
            if is_plain_device_memory(source):
                source = as_bytes(source)[begin:end]
            elif begin:  # cut when its strides were others; its first slice takes all of it
                continue
            first = int(view.storage_offset()) * view.element_size() + begin
            placed.setdefault(source.device, []).append(Placed(source, first))
        if not placed:
            return
        memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        memory.set_(views[chunk[0].item].untyped_storage())
        for device, of_device in placed.items():
            if device not in self._streams:
                self._streams[device] = CopyStream(device)
            self._streams[device].fetch(memory, of_device)

    def finish(self) -> Callable[[], None] | None:
        """Let the current streams wait for the copies; return what waits for them here."""
        events = [
            event
            for copy_stream in self._streams.values()
            if (event := copy_stream.join()) is not None
        ]
        if not events:
            return None

        def wait() -> None:
            for event in events:
                event.synchronize()

        return wait
