"""When each computation of a step ran on one rank, to be held against the simulator's.

Times are those of the host's clock, so that rows of ranks fit together; on CUDA they are those of
the device, which the host waits for once, in `spans`.

    track = TimeTrack()
    executor.step(inputs, targets, times=track)
    found = Simulation.measured(rows)           # `track.spans()` of every rank, in order
    found.bubble, simulate(schedule, found.costs()).bubble
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

import torch

from moe_pipeline.schedules.table import Action, Span

# A moment: of the host, or on a device.
_Mark = float | torch.cuda.Event


@final
class TimeTrack:
    """Records one step of one rank; give it to `PipelineExecutor.step`.

    Args:
        device: whose times count; None, or one of the CPU: the host's.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._origin: torch.cuda.Event | None = None
        self._marks: list[tuple[Action, _Mark, _Mark]] = []
        if device is not None and device.type == "cuda":
            torch.cuda.synchronize(device)
            self._origin = torch.cuda.Event(enable_timing=True)
            self._origin.record()
        # Seconds of this clock and of the one that all processes of a machine, and others, share.
        self._begin_s, self._epoch_s = time.perf_counter(), time.time()

    @contextmanager
    def around(self, action: Action) -> Iterator[None]:
        """Around a computation."""
        begin = self._mark()
        yield
        self._marks.append((action, begin, self._mark()))

    def spans(self) -> list[Span]:
        """The computations so far, in order."""
        return [Span(action, self._time_s(a), self._time_s(b)) for action, a, b in self._marks]

    def _mark(self) -> _Mark:
        if self._origin is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _time_s(self, mark: _Mark) -> float:
        if isinstance(mark, float):
            return self._epoch_s + mark - self._begin_s
        mark.synchronize()
        origin = mark if self._origin is None else self._origin
        return self._epoch_s + float(origin.elapsed_time(mark)) / 1000
