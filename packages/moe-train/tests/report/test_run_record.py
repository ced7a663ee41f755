import json
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from moe_train.report.run_record import RunRecord


def starts(folder: Path) -> list[dict[str, Any]]:
    return list(json.loads((folder / "run.json").read_text())["starts"])


def test_an_entry_is_there_from_the_start_on_and_gets_its_end(tmp_path: Path) -> None:
    record = RunRecord(tmp_path, {"command": "moe-train train job.toml"})
    (entry,) = starts(tmp_path)
    assert entry["command"] == "moe-train train job.toml"
    assert entry["versions"]["torch"] == torch.__version__.partition("+")[0]
    assert entry["ended_at"] is None and entry["exit_reason"] is None
    assert entry["host"] and entry["python"] and entry["platform"]
    lines = [
        {"step": 1, "loss": 5.0},
        {"step": 2, "loss": 4.0},
        {"step": 2, "validation_loss": 4.5},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    record.end("finished")
    (entry,) = starts(tmp_path)
    assert entry["exit_reason"] == "finished" and entry["duration_s"] >= 0
    assert (entry["last_step"], entry["final_loss"], entry["final_validation_loss"]) == (
        2,
        4.0,
        4.5,
    )
    began, ended = (datetime.fromisoformat(entry[f"{name}_at"]) for name in ("started", "ended"))
    assert began.tzinfo is not None and began <= ended


def test_a_later_start_is_added_and_says_that_the_former_was_killed(tmp_path: Path) -> None:
    RunRecord(tmp_path, {})
    RunRecord(tmp_path, {}).end("stopped by SIGTERM after saving")
    RunRecord(tmp_path, {})
    assert [entry["exit_reason"] for entry in starts(tmp_path)] == [
        "killed before it could say how it ended",
        "stopped by SIGTERM after saving",
        None,
    ]


def test_a_file_of_another_kind_is_kept_beside(tmp_path: Path) -> None:
    for text in ("not json", "[]", '{"starts": [1]}'):
        (tmp_path / "run.json").write_text(text)
        RunRecord(tmp_path, {}).end("finished")
        assert len(starts(tmp_path)) == 1
        assert (tmp_path / "run.json.former").read_text() == text
