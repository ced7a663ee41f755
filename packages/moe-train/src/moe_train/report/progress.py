"""How far the run is, in one line: live on a terminal, now and then a plain line elsewhere.

Invariant: it only ever shows; a closed, narrow or missing terminal changes nothing in the training.

    line = ProgressLine(total_steps=250, mode="auto")
    line.update(1, {"loss": 8.3, "lr": 1e-4})
    line.close()
"""

import math
import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from moe_train.errors import TrainValueError

_WINDOW_STEPS = 20
_PLAIN_LINES = 50
_BAR_CELLS = 12
_FIGURES = (
    ("loss", "loss", "{:.4f}"),
    ("validation_loss", "val", "{:.4f}"),
    ("lr", "lr", "{:.2e}"),
    ("grad_norm", "norm", "{:.2f}"),
    ("tokens_per_s", "tok/s", "{:,.0f}"),
    ("data_wait_fraction", "data wait", "{:.1%}"),
    ("expert_load_max_over_mean", "load max/mean", "{:.2f}"),
)


class ProgressLine:
    """Shows the newest figures of the run and the time left.

    Args:
        total_steps: steps of the whole run.
        mode: `live` redraws one line; `plain` prints about 50 lines over the run, and every
            validation; `off` prints nothing; `auto` is live on a terminal and plain elsewhere.
        stream: where to write; the default is standard output.

    Raises:
        ValueError: an unknown mode.
    """

    def __init__(self, total_steps: int, mode: str, stream: TextIO | None = None) -> None:
        if mode not in ("auto", "live", "plain", "off"):
            raise TrainValueError(f'mode={mode!r} must be "auto", "live", "plain" or "off"')
        out = sys.stdout if stream is None else stream
        self.mode = ("live" if out.isatty() else "plain") if mode == "auto" else mode
        self._total_steps = total_steps
        self._stream = out
        self._every = max(1, math.ceil(total_steps / _PLAIN_LINES))
        self._values: dict[str, float] = {}
        self._marks: deque[tuple[int, float]] = deque(maxlen=_WINDOW_STEPS + 1)
        self._printed_step = 0
        self._live: Live | None = None
        if self.mode == "live":
            console = Console(file=out, force_terminal=True)
            # No refreshing thread: the line changes when a step ends, and at no other time.
            self._live = Live(console=console, auto_refresh=False)
            self._live.start()

    def update(self, step: int, values: Mapping[str, object]) -> None:
        """Show the figures of `step`; figures not given keep their last value."""
        numbers = {k: float(v) for k, v in values.items() if isinstance(v, int | float)}
        self._values.update(numbers)
        if not self._marks or self._marks[-1][0] != step:
            self._marks.append((step, time.monotonic()))
        if self._live is not None:
            text = Text(self.text(step), no_wrap=True, overflow="ellipsis")
            self._live.update(text, refresh=True)
        elif self.mode == "plain" and self._is_due(step, "validation_loss" in numbers):
            self._printed_step = step
            print(self.text(step), file=self._stream, flush=True)

    def text(self, step: int) -> str:
        """The line without colours, as it stands at `step`."""
        parts = [f"step {step}/{self._total_steps}"]
        if self.mode == "live":
            full = _BAR_CELLS * min(step, self._total_steps) // max(1, self._total_steps)
            parts.append("━" * full + "╌" * (_BAR_CELLS - full))
        left_s = self._time_left_s(step)
        if left_s is not None:  # before the figures, which a narrow terminal cuts off
            parts.append(f"left {_clock(left_s)}")
        parts += [
            f"{label} {form.format(self._values[name])}"
            for name, label, form in _FIGURES
            if name in self._values
        ]
        return "  ".join(parts)

    def close(self) -> None:
        """Leave the terminal in order; the last line stays."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _is_due(self, step: int, validated: bool) -> bool:
        if validated:
            return True
        due = step in (1, self._total_steps) or step % self._every == 0
        return due and step != self._printed_step

    def _time_left_s(self, step: int) -> float | None:
        """From the newest steps; at the first one from its own duration, where that is known."""
        steps_left = max(0, self._total_steps - step)
        if not self._marks:
            return None
        (first_step, first_s), (last_step, last_s) = self._marks[0], self._marks[-1]
        if last_step > first_step:
            return (last_s - first_s) / (last_step - first_step) * steps_left
        step_s = self._values.get("step_time_s")
        return None if step_s is None else step_s * steps_left


def _clock(seconds: float) -> str:
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"
