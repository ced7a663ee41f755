"""What was started in a run's folder, when, with which versions, and how it ended: `run.json`.

Invariant: one entry a start, the newest last, and the file is whole at any moment. An entry without
an end belongs to a start that is running or that was killed; the next start says which.

    record = RunRecord(Path("runs/a"), {"command": ["moe-train", "train", "job.toml"]})
    record.end("finished")
"""

import json
import platform
import socket
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from moe_train.cache import write_atomic
from moe_train.report.metrics import METRICS_FILE, read_metrics

RUN_FILE = "run.json"
_PACKAGES = (
    "moe-train",
    "moe-pipeline",
    "comm-collectives",
    "mesh-spmd",
    "unified-ckpt",
    "weight-convert",
    "gpu-alloc",
    "torch",
    "numpy",
    "tokenizers",
    "safetensors",
)


class RunRecord:
    """The entry of one start, written when it is made and once more at the end.

    One process of a job makes it, while it holds the folder.

    Args:
        folder: of the run.
        facts: what the starter knows: command, device, layout and the like.
    """

    def __init__(self, folder: Path, facts: Mapping[str, object]) -> None:
        self._path = folder / RUN_FILE
        self._began_s = time.monotonic()
        self._starts = _read_starts(self._path)
        for former in self._starts:
            if former.get("exit_reason") is None:
                former["exit_reason"] = "killed before it could say how it ended"
        self._starts.append(
            {
                **facts,
                "started_at": _now(),
                "ended_at": None,
                "duration_s": None,
                "exit_reason": None,
                "host": socket.gethostname(),
                "python": platform.python_version(),
                "platform": platform.platform(),
                "versions": _versions(),
            }
        )
        self._write()

    def end(self, reason: str) -> None:
        """Write down how the start ended, and the last figures in the run's metrics."""
        self._starts[-1] |= {
            "ended_at": _now(),
            "duration_s": round(time.monotonic() - self._began_s, 3),
            "exit_reason": reason,
            **_last_figures(self._path.parent / METRICS_FILE),
        }
        self._write()

    def _write(self) -> None:
        write_atomic(self._path, json.dumps({"starts": self._starts}, indent=2) + "\n")


def _read_starts(path: Path) -> list[dict[str, Any]]:
    """The entries so far; a file that is none of ours is kept beside, not lost."""
    if not path.exists():
        return []
    try:
        starts = json.loads(path.read_bytes())["starts"]
        if isinstance(starts, list) and all(isinstance(entry, dict) for entry in starts):
            return starts
    except (ValueError, KeyError, TypeError):
        pass
    path.replace(path.with_suffix(".json.former"))
    return []


def _last_figures(metrics_file: Path) -> dict[str, object]:
    """Last step, and the last loss and validation loss, of a run that has any."""
    found: dict[str, object] = {}
    if metrics_file.exists():
        for line in read_metrics(metrics_file):
            found["last_step"] = line["step"]
            found |= {f"final_{k}": line[k] for k in ("loss", "validation_loss") if k in line}
    return found


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # run from a checkout, with its sources on the path
            found[name] = "not installed"
    return found


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
