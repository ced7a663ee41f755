import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from moe_train.report.plots import _running_mean, write_plots

# Colours of the two lines, as fractions of red, green and blue.
BLUE = np.array([0x1F, 0x77, 0xB4]) / 255
ORANGE = np.array([0xFF, 0x7F, 0x0E]) / 255


def write_metrics(folder: Path, lines: list[dict[str, object]]) -> Path:
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def places(image: np.ndarray, colour: np.ndarray) -> np.ndarray:
    """Rows and columns of the pixels of a colour, [N, 2]."""
    return np.argwhere(np.abs(image[:, :, :3] - colour).max(axis=2) < 0.03)


def test_loss_picture_shows_both_lines_falling(tmp_path: Path) -> None:
    lines: list[dict[str, object]] = []
    for step in range(1, 101):
        lines.append({"step": step, "loss": 8.0 - 0.05 * step})
        if step % 25 == 0:
            lines.append({"step": step, "validation_loss": 9.0 - 0.05 * step})
    assert write_plots(write_metrics(tmp_path, lines), tmp_path) == [tmp_path / "loss.png"]
    image = imread(tmp_path / "loss.png")
    height, width = image.shape[:2]
    assert height >= 400 and width >= 600
    for colour in (BLUE, ORANGE):
        found = places(image, colour)
        found = found[found[:, 1] < width * 0.65]  # the legend stands at the right
        left, right = found[found[:, 1].argmin()], found[found[:, 1].argmax()]
        assert len(found) > 100
        assert right[0] > left[0] + height * 0.1  # rows count downwards: the line falls


def test_the_smoothed_line_begins_where_it_has_a_whole_window() -> None:
    assert _running_mean([1.0] * 19) == []
    assert _running_mean([1.0] * 20) == [1.0]
    assert _running_mean([0.0] * 20 + [20.0]) == [0.0, 1.0]


def test_load_picture_shows_the_busy_expert(tmp_path: Path) -> None:
    lines: list[dict[str, object]] = [
        {"step": step, "loss": 3.0, "expert_load/0": [90, 5, 5], "expert_load/2": [1, 1, 1]}
        for step in range(1, 31)
    ]
    written = write_plots(write_metrics(tmp_path, lines), tmp_path / "out")
    assert [path.name for path in written] == ["loss.png", "expert_load.png"]
    image = imread(written[1])
    height, width = image.shape[:2]
    brightest = np.array([0xFD, 0xE7, 0x25]) / 255  # the upper end of the colour map
    found = places(image[:, : int(width * 0.4)], brightest)
    assert len(found) > 0.01 * height * width
    assert found[:, 0].max() < height * 0.6  # the upper row is layer 0
    assert found[:, 1].max() < width * 0.25  # its first expert
    assert len(places(image[:, width // 2 :], BLUE)) > 100  # layer 0's ratio over the steps


def test_metrics_without_figures_give_no_pictures(tmp_path: Path) -> None:
    lines: list[dict[str, object]] = [
        {"step": 1, "loss": None, "lr": 1e-3, "expert_load/0": [0, 0]},
    ]
    assert write_plots(write_metrics(tmp_path, lines), tmp_path) == []


def test_resumed_and_uneven_loads_are_drawn(tmp_path: Path) -> None:
    lines: list[dict[str, object]] = [{"step": 1, "expert_load/0": [1, 2]}]
    lines += [{"step": s, "loss": 1.0, "expert_load/0": [1, 2, 3, 4]} for s in (2, 3)]
    lines += [{"step": 4, "expert_load/1": [5, 5]}]
    written = write_plots(write_metrics(tmp_path, lines), tmp_path)
    assert [path.name for path in written] == ["loss.png", "expert_load.png"]
    assert all(imread(path)[:, :, :3].std() > 0.05 for path in written)


def test_missing_metrics_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_plots(tmp_path / "no.jsonl", tmp_path)
