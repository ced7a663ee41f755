"""The pictures of a run: did the loss fall, and did every expert get work.

Invariant: a picture is made from `metrics.jsonl` alone, so it can be made again at any time.

    write_plots(Path("runs/a/metrics.jsonl"), Path("runs/a"))   # loss.png, expert_load.png
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from moe_train.errors import check_type
from moe_train.report.metrics import EXPERT_LOAD, read_metrics

_SMOOTHED_STEPS = 20
_Points = list[tuple[int, float]]


@dataclass(slots=True)
class _Series:
    """What the pictures show, by step."""

    loss: _Points = field(default_factory=list)
    validation: _Points = field(default_factory=list)
    load: dict[int, "_Loads"] = field(default_factory=lambda: defaultdict(_Loads))


@dataclass(slots=True)
class _Loads:
    """Of one layer: the busiest expert over the mean, by step, and the rows of the last steps."""

    ratios: _Points = field(default_factory=list)
    recent: deque[list[float]] = field(default_factory=lambda: deque(maxlen=_SMOOTHED_STEPS))

    def add(self, step: int, counts: list[float]) -> None:
        """Take the rows of each expert in a step."""
        self.ratios.append((step, max(counts) * len(counts) / sum(counts)))
        self.recent.append(counts)


def write_plots(metrics_file: Path, output_dir: Path) -> list[Path]:
    """Write `loss.png` and, if the file has expert loads, `expert_load.png`.

    Returns:
        The files written; a picture without data is left out.

    Raises:
        OSError: the metrics cannot be read or a picture cannot be written.
    """
    check_type("metrics_file", metrics_file, Path)
    check_type("output_dir", output_dir, Path)
    series = _read(metrics_file)
    # Imported here: matplotlib is slow to load and is needed once, at the end of a run. A Figure
    # made without pyplot draws with Agg and needs neither a display nor global state.
    figure_type = import_module("matplotlib.figure").Figure
    written = []
    if series.loss or series.validation:
        written.append(_save(_loss_figure(figure_type, series), output_dir / "loss.png"))
    if series.load:
        figure = _load_figure(figure_type, series.load)
        written.append(_save(figure, output_dir / "expert_load.png"))
    return written


def _read(metrics_file: Path) -> _Series:
    series = _Series()
    for line in read_metrics(metrics_file):
        step = line["step"]
        for name, points in (("loss", series.loss), ("validation_loss", series.validation)):
            if isinstance(line.get(name), int | float):
                points.append((step, float(line[name])))
        for name, value in line.items():
            layer = name.removeprefix(EXPERT_LOAD)
            if layer != name and layer.isdecimal() and isinstance(value, list) and sum(value) > 0:
                series.load[int(layer)].add(step, [float(count) for count in value])
    return series


def _save(figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path


def _loss_figure(figure_type: Any, series: _Series) -> Any:
    figure = figure_type(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    if series.loss:
        steps, losses = zip(*series.loss, strict=True)
        axes.plot(steps, losses, color="tab:blue", alpha=0.35, linewidth=1, label="training")
        means = _running_mean(losses)
        if means:  # begins where it has a whole window
            axes.plot(
                steps[-len(means) :],
                means,
                color="tab:blue",
                linewidth=2,
                label=f"training, mean of {_SMOOTHED_STEPS} steps",
            )
    if series.validation:
        steps, losses = zip(*series.validation, strict=True)
        axes.plot(steps, losses, color="tab:orange", marker="o", linewidth=2, label="validation")
    axes.set_xlabel("step")
    axes.set_ylabel("cross entropy (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def _running_mean(values: Sequence[float]) -> list[float]:
    """The mean of each `_SMOOTHED_STEPS` values in a row; none of fewer values."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    return list((total[_SMOOTHED_STEPS:] - total[:-_SMOOTHED_STEPS]) / _SMOOTHED_STEPS)


def _load_figure(figure_type: Any, load: Mapping[int, _Loads]) -> Any:
    """Left: the share of routed rows of each expert at the end. Right: max over mean by step."""
    layers = sorted(load)
    figure = figure_type(figsize=(12, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    shares = _last_shares(load, layers)
    image = left.imshow(shares, aspect="auto", cmap="viridis", vmin=0.0)
    left.set_title(f"share of routed rows, last {_SMOOTHED_STEPS} logged steps")
    left.set_xlabel("expert")
    left.set_ylabel("layer")
    left.set_yticks(range(len(layers)), [str(layer) for layer in layers])
    figure.colorbar(image, ax=left, label="fraction of the layer's rows")
    for layer in layers:
        right.plot(*zip(*load[layer].ratios, strict=True), linewidth=1.2, label=f"layer {layer}")
    right.axhline(1.0, color="grey", linewidth=1, linestyle="--")
    right.set_title("busiest expert over the mean (1 is even)")
    right.set_xlabel("step")
    right.set_ylabel("max / mean")
    right.grid(alpha=0.3)
    if len(layers) <= 16:
        right.legend(fontsize="small")
    return figure


def _last_shares(
    load: Mapping[int, _Loads], layers: Sequence[int]
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Share of rows by (layer, expert), NaN (drawn empty) where a layer has fewer experts."""
    width = max(len(load[layer].recent[-1]) for layer in layers)
    shares = np.full((len(layers), width), np.nan)
    for row, layer in enumerate(layers):
        last = load[layer].recent[-1]
        recent = [counts for counts in load[layer].recent if len(counts) == len(last)]
        counts = np.sum(recent, axis=0)
        shares[row, : len(last)] = counts / counts.sum()
    return shares
