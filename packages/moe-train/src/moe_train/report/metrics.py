"""What happened at each step, in a file that a person, a script and TensorBoard can read.

`metrics.jsonl` has one JSON object a line: the step and some of these figures.

    loss, aux_loss, lr, grad_norm              of the step
    tokens_per_s, step_time_s                  its speed
    data_time_s, data_wait_fraction            the wait for batches, also as a share of the step
    expert_load/<layer>                        routed rows of each expert, a list
    expert_load_max_over_mean                  the busiest expert over the mean, worst layer
    consumed_samples                           sequences read since the run began
    validation_loss, validation_perplexity     of the held-out text, at intervals
    save_stall_s                               the time since the line before that training stood
                                               still for checkpoints

Invariant: steps never go back; resuming at step N drops what a lost run wrote after N, and a line
torn by a crash is dropped too.

    log = MetricsLog(Path("runs/a"), tensorboard=False)
    log.write(1, {"loss": 8.3})
    log.close()
"""

import json
import math
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"
EXPERT_LOAD = "expert_load/"


class MetricsLog:
    """Appends to `output_dir/metrics.jsonl` and, if asked, to `output_dir/tensorboard`.

    One process of a job writes it.

    Args:
        output_dir: made if it is missing.
        tensorboard: also write TensorBoard event files.
        resume_step: the last finished step that the run goes on from; lines of later steps are
            dropped. 0 begins a new file.

    Raises:
        OSError: the folder cannot be written.
    """

    def __init__(self, output_dir: Path, *, tensorboard: bool, resume_step: int = 0) -> None:
        output_dir.mkdir(parents=True, exist_ok=True)
        self.path = output_dir / METRICS_FILE
        _keep_until(self.path, resume_step)
        self._stream = self.path.open("a", encoding="utf-8")
        self._events: Any = None
        if tensorboard:
            # Imported here: TensorBoard takes longer to load than all the rest of a rank's modules.
            writer = import_module("torch.utils.tensorboard").SummaryWriter
            self._events = writer(str(output_dir / "tensorboard"), purge_step=resume_step + 1)

    def write(self, step: int, values: Mapping[str, object]) -> None:
        """Write one line for `step`; a step may have several lines, of different figures.

        Numbers that JSON cannot hold (infinite or not a number) are written as null.
        """
        line = {"step": step, **{name: _plain(value) for name, value in values.items()}}
        self._stream.write(json.dumps(line) + "\n")
        self._stream.flush()
        if self._events is not None:
            for name, number in _scalars(values):
                self._events.add_scalar(name, number, step)

    def close(self) -> None:
        """Write everything out; the log cannot be used any more."""
        if not self._stream.closed:
            self._stream.flush()
            os.fsync(self._stream.fileno())
            self._stream.close()
        if self._events is not None:
            self._events.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a metrics file as dicts; lines that a crash tore are left out."""
    with path.open(encoding="utf-8", errors="replace") as stream:
        for text in stream:
            line = _parse(text)
            if line is not None:
                yield line


def _parse(text: str | bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) and isinstance(line.get("step"), int) else None


def _keep_until(path: Path, step: int) -> None:
    if path.exists():
        os.truncate(path, _end_of(path, step))


def _end_of(path: Path, step: int) -> int:
    """Where the last whole line of at most this step ends; 0: there is none.

    Read from the end, since a long run has written gigabytes.
    """
    if not step or not path.stat().st_size:
        return 0
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as text:
        end = len(text)
        while end:
            start = text.rfind(b"\n", 0, end - 1) + 1
            line = _parse(text[start:end]) if text[end - 1 : end] == b"\n" else None
            if line is not None and line["step"] <= step:
                break
            end = start
        return end


def _plain(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value


def _scalars(values: Mapping[str, object]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, int | float):
            yield name, float(value)
        elif name.startswith(EXPERT_LOAD) and isinstance(value, Sequence) and sum(value):
            yield name + "/max_over_mean", max(value) * len(value) / sum(value)
