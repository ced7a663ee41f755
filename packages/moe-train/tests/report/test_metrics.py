import json
import math
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from moe_train.report import metrics
from moe_train.report.metrics import MetricsLog, read_metrics


def steps(path: Path) -> list[int]:
    return [line["step"] for line in read_metrics(path)]


def test_lines_are_json_and_on_disk_at_once(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "run", tensorboard=False)
    log.write(1, {"loss": 8.5, "consumed_samples": 32, "expert_load/0": [3, 5]})
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert json.loads(text) == {
        "step": 1,
        "loss": 8.5,
        "consumed_samples": 32,
        "expert_load/0": [3, 5],
    }
    log.close()
    log.close()


def test_numbers_that_json_lacks_are_null(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, tensorboard=False)
    log.write(1, {"loss": math.nan, "grad_norm": math.inf, "x": [1.0, -math.inf]})
    log.close()
    line = next(read_metrics(log.path))
    assert line == {"step": 1, "loss": None, "grad_norm": None, "x": [1.0, None]}


@pytest.mark.parametrize(("resume_step", "kept"), [(0, []), (2, [1, 2, 2]), (9, [1, 2, 2, 3, 4])])
def test_resuming_drops_what_came_after(tmp_path: Path, resume_step: int, kept: list[int]) -> None:
    log = MetricsLog(tmp_path, tensorboard=False)
    for step in (1, 2, 2, 3, 4):
        log.write(step, {"loss": 1.0 / step})
    log.close()
    again = MetricsLog(tmp_path, tensorboard=False, resume_step=resume_step)
    assert steps(again.path) == kept
    again.write(resume_step + 1, {"loss": 0.5})
    again.close()
    assert steps(again.path) == [*kept, resume_step + 1]


def test_line_torn_by_a_crash_is_dropped_on_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "loss": 2.0}\n[3]\n\xff\n{"step": 2, "lo')
    assert steps(path) == [1]
    log = MetricsLog(tmp_path, tensorboard=False, resume_step=2)
    log.write(3, {"loss": 1.0})
    log.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 3]


# TensorBoard's own modules warn of their dependencies' deprecations.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_holds_the_scalars_and_the_balance_of_experts(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, tensorboard=True)
    for step in (1, 2):
        log.write(step, {"loss": 8.0 / step, "expert_load/1": [6, 2], "expert_load/2": [0, 0]})
    log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["expert_load/1/max_over_mean", "loss"]
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 8.0), (2, 4.0)]
    assert events.Scalars("expert_load/1/max_over_mean")[0].value == 1.5


def test_unwritable_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        MetricsLog(tmp_path / "file" / "run", tensorboard=False)


def test_lines_that_stay_are_not_read_when_a_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long run has written gigabytes, and other ranks wait."""
    path = tmp_path / "metrics.jsonl"
    lines = [f'{{"step":   {step}, "loss": 1.0}}\n' for step in range(1, 1001)]
    path.write_text("".join(lines))
    parsed, parse = [], metrics._parse

    def counted(text: str | bytes) -> object:
        parsed.append(text)
        return parse(text)

    monkeypatch.setattr(metrics, "_parse", counted)
    MetricsLog(tmp_path, tensorboard=False, resume_step=990).close()
    assert path.read_text() == "".join(lines[:990])
    assert len(parsed) == 11
