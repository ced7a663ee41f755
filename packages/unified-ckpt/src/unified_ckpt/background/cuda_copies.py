"""Copies from a CUDA device into pinned staging memory, on a stream of their own.

The stream waits for what the trainer's stream had done when the snapshot began, and the trainer's
stream waits for the copies only when the tensors are about to change.

    copies.start()
    copies.issue(chunk, sources, views)
    wait = copies.finish()  # a function that returns when the copies are done; None without any
"""

from collections.abc import Callable, Sequence

import torch

from unified_ckpt.background.offload_plan import ByteSlice
from unified_ckpt.geometry.tensors import bits_of


class DeviceCopies:
    """The device's part of one snapshot after the other; makes no stream without device tensors."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._begun: set[torch.device] = set()

    def start(self) -> None:
        """Begin a snapshot."""
        self._begun = set()

    def issue(
        self,
        chunk: Sequence[ByteSlice],
        sources: Sequence[torch.Tensor],
        views: Sequence[torch.Tensor],
    ) -> None:
        """Enqueue the copies of the device tensors among the slices."""
        for index, begin, end in chunk:
            source = sources[index].detach()
            if source.device.type == "cpu":
                continue
            with torch.no_grad(), torch.cuda.stream(self._stream(source.device)):
                if is_plain_device_memory(source):
                    target = _bytes(views[index])[begin:end]
                    target.copy_(_bytes(source)[begin:end], non_blocking=True)
                else:
                    bits_of(views[index]).copy_(bits_of(source), non_blocking=True)

    def finish(self) -> Callable[[], None] | None:
        """Let the current streams wait for the copies; return what waits for them here."""
        events = []
        for device in self._begun:
            event = torch.cuda.Event()
            event.record(self._streams[device])
            torch.cuda.current_stream(device).wait_event(event)
            events.append(event)
        if not events:
            return None

        def wait() -> None:
            for event in events:
                event.synchronize()

        return wait

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        if device not in self._begun:
            self._begun.add(device)
            stream.wait_stream(torch.cuda.current_stream(device))
        return stream


def is_plain_device_memory(tensor: torch.Tensor) -> bool:
    """Whether the tensor's row-major values are its device memory as it lies there."""
    plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    return tensor.device.type != "cpu" and plain


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
