"""Have the batches of a step on the device when the step begins, without stopping anything.

A background thread makes the batches of the next steps; on CUDA it copies them into pinned memory
and from there, on a stream of its own, to the device. The step's stream waits for the copy (an
event on the device), the CPU never does. Stages that need no tokens do the same with no batches.

Invariant: what `load` gives depends on the first sample alone; it is ready for the current stream,
and its memory is not used anew while that stream reads it.

    with BatchLoader(reader, device, range(0, 160, 16), depth=2, timeout_s=60) as loader:
        loader.load(0).batches
"""

from dataclasses import dataclass, replace
from types import TracebackType

import torch
from torch import Tensor

from moe_train.data import Batch
from moe_train.training.batches import SampleReader, StepBatches
from moe_train.training.prefetch import Prefetcher


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sent:
    """Batches on their way, and the event that ends it."""

    step: StepBatches
    arrived: torch.cuda.Event | None = None


class BatchLoader:
    """This rank's batches, ahead of the steps that use them.

    Args:
        first_samples: the first sample of each coming step.
        depth: for how many steps batches are made ahead; 0 makes them when they are asked for.
        timeout_s: longest wait for one step's batches.
    """

    def __init__(
        self,
        reader: SampleReader,
        device: torch.device,
        first_samples: range,
        *,
        depth: int,
        timeout_s: float,
    ) -> None:
        self._reader, self._device = reader, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._coming = Prefetcher(self._send, first_samples, depth=depth, timeout_s=timeout_s)

    def __enter__(self) -> "BatchLoader":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._coming.close()

    def load(self, first_sample: int) -> StepBatches:
        """The batches of the step that begins with this sample, on the device."""
        sent = self._coming.get(first_sample)
        if sent.arrived is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(sent.arrived)
            for batch in sent.step.batches:
                for tensor in (batch.input_ids, batch.labels, batch.position_ids):
                    tensor.record_stream(stream)
        return sent.step

    def _send(self, first_sample: int) -> _Sent:
        step = self._reader.read(first_sample)
        if self._stream is None or not step.batches:
            return _Sent(step=step)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            there = tuple(
                Batch(
                    input_ids=self._copy(batch.input_ids),
                    labels=self._copy(batch.labels),
                    position_ids=self._copy(batch.position_ids),
                )
                for batch in step.batches
            )
            return _Sent(
                step=replace(step, batches=there),
                arrived=self._stream.record_event(),
            )

    def _copy(self, tensor: Tensor) -> Tensor:
        # torch keeps the pinned block until the copy has read it.
        return tensor.pin_memory().to(self._device, non_blocking=True)
