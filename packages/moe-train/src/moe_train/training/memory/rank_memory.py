"""Whose memory a rank runs in, what it allocates, and what is told when there is none left.

Phases say what a rank is busy with. An out-of-memory is named with the innermost of them, there and
then, so that the ranks that wait for this one are told the same.

Invariant: what is told of an out-of-memory never hides it: a report that cannot be written is left
out by name.

    with RankMemory.begin(config, device) as memory:
        with memory.phase("building"):
            runner, _ = build_runner(config, model, parallel, {})
        with memory.step(1):
            runner.train(batches, lr=1e-3, memory=memory)
"""

import logging
import os
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from gpu_alloc import save_trace
from gpu_alloc.core import OomReport
from gpu_alloc.native import Arena
from gpu_alloc.torch import TraceRecorder, replace
from gpu_alloc.trace import summarize
from moe_pipeline.schedules.table import Action, Kind
from moe_train.config import Config
from moe_train.early_checks import allocator_settings
from moe_train.errors import RankOutOfMemoryError
from moe_train.rank import rank_number
from moe_train.training.memory.out_of_memory import (
    OF_GPU_ALLOC,
    out_of_memory_in,
    requested_bytes,
)

MEMORY_FOLDER = "memory"
LABELS = {"comm_collectives.moe": "dispatch buffers", "moe_train.optim.optimizer": "optimizer"}
_KEPT_STEPS = 3
_REMEDY = (
    "take smaller microbatches (train.gradient_accumulation_steps), keep less for the backward "
    '(train.recompute="layers"), or share the model by more ranks; `moe-train plan` says what each '
    "rank needs"
)
_DOES = {Kind.FORWARD: "forward", Kind.WEIGHT_GRADIENT: "weight gradients"}

logger = logging.getLogger(__name__)
_Around = Callable[[Action], AbstractContextManager[object]]


@final
class RankMemory:
    """The memory of one rank; not for several threads.

    Attributes:
        rank: that an out-of-memory names.

    Args:
        rank: as above.
        recorder: what keeps the allocations, if any.
        arena: what serves the device, if it is not torch.
        folder: where reports and the trace go; None: nowhere.
        device: that of the rank.
    """

    def __init__(
        self,
        *,
        rank: int = 0,
        recorder: TraceRecorder | None = None,
        arena: Arena | None = None,
        folder: Path | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.rank, self.recorder, self._arena = rank, recorder, arena
        self._folder, self._device = folder, device
        self._phases: list[str] = []

    @classmethod
    @contextmanager
    def begin(cls, config: Config, device: torch.device) -> Iterator["RankMemory"]:
        """Serve the device as `[memory]` says, and record inside if it asks for that.

        To be entered before torch has used CUDA.

        Raises:
            ValueError: the settings are none.
            RuntimeError: torch has used its own allocator already.
        """
        arena = None
        if config.memory.allocator == "gpu-alloc" and device.type == "cuda":
            arena = replace(allocator_settings(config))
            if rank_number() == 0:
                _say_served(arena)
        recorder = None
        if config.memory.record:
            of = None if device.type == "cpu" else device.type
            recorder = TraceRecorder(device=of, labels=LABELS, all_threads=True)
        folder = config.log_folder / MEMORY_FOLDER
        memory = cls(
            rank=rank_number(), recorder=recorder, arena=arena, folder=folder, device=device
        )
        try:
            with nullcontext() if recorder is None else recorder:
                yield memory
        finally:
            memory.keep_trace()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What this rank is busy with inside.

        Raises:
            RankOutOfMemoryError: for any out-of-memory inside, with what is known of it.
        """
        self._phases.append(name)
        try:
            with nullcontext() if self.recorder is None else self.recorder.phase(name):
                yield
        except Exception as error:
            cause = out_of_memory_in(error)
            if cause is None:
                raise
            raise self._reported(cause) from error
        finally:
            self._phases.pop()

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """A step of training; of those long before it the record is dropped."""
        if self.recorder is not None:
            self.recorder.forget(f"step {number - _KEPT_STEPS + 1}")
        with self.phase(f"step {number}"):
            yield

    def around(self, inside: _Around | None) -> _Around:
        """What each computation of a pipeline runs in: a phase of its own, and in it `inside`."""

        @contextmanager
        def around(action: Action) -> Iterator[None]:
            does = _DOES.get(action.kind, "backward")
            name = f"{does} of microbatch {action.microbatch}, stage {action.stage}"
            with self.phase(name), nullcontext() if inside is None else inside(action):
                yield

        return around

    def label(self, name: str, tensors: Iterable[Tensor]) -> None:
        """Note what live tensors are, if anything is recorded."""
        if self.recorder is not None:
            self.recorder.label(name, tensors)

    def keep_trace(self) -> Path | None:
        """Write what was recorded so far; None where nothing is, or it cannot be written."""
        if self.recorder is None or self._folder is None:
            return None
        path = trace_file(self._folder, self.rank)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_trace(self.recorder.events, path)
        except OSError as error:
            logger.warning("warning: the trace of rank %d is not written: %s", self.rank, error)
            return None
        return path

    def _reported(self, error: BaseException) -> RankOutOfMemoryError:
        """The error that names rank and phase; its report is written beside the metrics."""
        where = ", ".join(self._phases)
        lines = [f"rank {self.rank} is out of memory in {where}", *_indented(self._why(error))]
        if self.recorder is not None:
            parts = summarize(self.recorder.events).peak_by_line
            sizes = (f"{name or 'activations'} {size / 2**20:.1f} MiB" for name, size in parts)
            lines += _indented(f"recorded peak: {', '.join(sizes)}")
            report, asked_bytes = self._report(error), requested_bytes(error)
            if report is not None:
                self.recorder.failed(report.requested_bytes, report.stream)
            elif asked_bytes is not None:
                self.recorder.failed(asked_bytes)
        return RankOutOfMemoryError("\n".join([*lines, *_indented(self._written(lines, error))]))

    def _why(self, error: BaseException) -> str:
        report = self._report(error)
        if report is not None:
            return report.message()
        return f"{str(error).splitlines()[0][:400]}\nremedy: {_REMEDY}"

    def _report(self, error: BaseException) -> OomReport | None:
        """gpu-alloc's own, if it is what had no memory."""
        if self._arena is None or self._device is None or OF_GPU_ALLOC not in str(error):
            return None
        return self._arena.allocator(self._device.index or 0).last_report()

    def _written(self, lines: list[str], error: BaseException) -> str:
        """Write the report, with the traceback, and the trace; where they are."""
        if self._folder is None:
            return ""
        path = self._folder / f"rank-{self.rank:05d}.out_of_memory.txt"
        text = "\n".join([*lines, "", "".join(traceback.format_exception(error))])
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as failed:
            return f"no report is written: {failed}"
        said = f"written with the traceback to {path}"
        trace = self.keep_trace()
        if trace is None:
            return f"{said}; memory.record=true keeps what each rank allocates"
        return f"{said}; why, and what helps: gpu-alloc explain {trace}{self._capacity()}"

    def _capacity(self) -> str:
        if self._device is None or self._device.type != "cuda":
            return " --capacity-bytes BYTES"
        return f" --capacity-bytes {torch.cuda.mem_get_info(self._device)[1]}"


def trace_file(folder: Path, rank: int) -> Path:
    """Where a rank's trace goes."""
    return folder / f"rank-{rank:05d}.jsonl"


def _say_served(arena: Arena) -> None:
    logger.info("gpu-alloc serves the devices: %s", arena.config.format())
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if os.environ.get(name):
            logger.warning("warning: %s is of torch's allocator, which serves nothing", name)


def _indented(text: str) -> list[str]:
    return [f"  {line}" for line in text.splitlines()]
