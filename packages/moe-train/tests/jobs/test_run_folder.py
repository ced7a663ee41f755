import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from moe_train.config import Config, load_config
from moe_train.jobs.run_folder import run_folder
from moe_train.training import LayoutRequests


def reasons(folder: Path) -> list[str]:
    return [
        entry["exit_reason"] for entry in json.loads((folder / "run.json").read_text())["starts"]
    ]


def test_the_folder_gets_the_job_and_the_story_of_each_start(
    configure: Callable[..., Config], tmp_path: Path
) -> None:
    config = configure("parallel.ep=2")
    with run_folder(config, None, command="moe-train train job.toml") as folder:
        assert load_config(folder.resolved) == config
    with (
        pytest.raises(KeyError, match="expert 7"),
        run_folder(config, None, command="moe-train train job.toml"),
    ):
        raise KeyError("expert 7\nsecond line")
    with run_folder(config, None, command="") as folder:
        folder.end("stopped by SIGTERM after saving")
    assert reasons(tmp_path / "run") == [
        "finished",
        "failed: 'expert 7\\nsecond line'",
        "stopped by SIGTERM after saving",
    ]
    entry = json.loads((tmp_path / "run" / "run.json").read_text())["starts"][0]
    assert (entry["device"], entry["resumed_from"]) == ("cpu", None)
    assert entry["layout"] == {"pp": 1, "dp": 1, "ep": 2}


def test_a_layout_asked_of_an_earlier_job_is_forgotten_and_one_asked_while_ranks_start_is_not(
    configure: Callable[..., Config], tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    requests = LayoutRequests(tmp_path / "run")
    requests.ask((1, 2, 1, 1, 1, 1))
    with run_folder(configure(), None, command=""):
        assert not requests.is_waiting()
        requests.ask((1, 1, 2, 1, 1, 1))
        assert requests.is_waiting()


def test_a_second_job_is_refused_by_name_and_changes_nothing(
    configure: Callable[..., Config], tmp_path: Path
) -> None:
    with run_folder(configure(), None, command="first") as folder:
        text = folder.resolved.read_text()
        with (
            pytest.raises(BlockingIOError, match=rf"^train.output_dir={tmp_path}/run is in use by"),
            run_folder(configure("train.seed=9"), None, command="second"),
        ):
            pass
        assert folder.resolved.read_text() == text
    assert reasons(tmp_path / "run") == ["finished"]


def test_checkpoints_that_came_since_the_check_are_not_mixed_with(
    configure: Callable[..., Config], tmp_path: Path
) -> None:
    (tmp_path / "run" / "checkpoint-3").mkdir(parents=True)
    with (
        pytest.raises(ValueError, match="already holds checkpoints"),
        run_folder(configure(), None, command=""),
    ):
        pass
    assert [path.name for path in (tmp_path / "run").iterdir()].count("run.json") == 0


def test_a_folder_that_takes_no_more_does_not_hide_how_the_run_ended(
    configure: Callable[..., Config], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "run"
    with (
        pytest.raises(KeyError, match="expert 7"),
        run_folder(configure(), None, command="moe-train train job.toml"),
    ):
        shutil.rmtree(out)
        out.write_text("a file")
        raise KeyError("expert 7")
    assert "warning: run.json does not say how the run ended: " in caplog.text


def test_a_new_run_does_not_take_away_the_metrics_of_another_one(
    configure: Callable[..., Config], tmp_path: Path
) -> None:
    log = f"log.dir={tmp_path / 'log'}"
    with run_folder(configure(log), None, command=""):
        metrics = tmp_path / "log" / "metrics.jsonl"
        metrics.write_text('{"step": 1}\n')
    with run_folder(configure(log), None, command=""):
        pass  # the same run, begun anew
    other = configure(log, f"train.output_dir={tmp_path / 'other'}")
    with (
        pytest.raises(ValueError, match=r"log.dir=\S+ holds the metrics of a run with another"),
        run_folder(other, None, command=""),
    ):
        pass
    with run_folder(other, tmp_path / "run" / "checkpoint-1", command=""):
        pass  # goes on with them
