"""The folder of a run while a job is in it: held against a second job, and its story written down.

with run_folder(config, source, command="moe-train train job.toml") as folder:
    folder.ended = "stopped by SIGTERM after saving"     # else: "finished", or the error
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from moe_train.cache import claimed
from moe_train.config import Config, dump_toml
from moe_train.early_checks import check_run_folders
from moe_train.errors import TrainValueError
from moe_train.parallel import choose_device
from moe_train.report import METRICS_FILE, RunRecord
from moe_train.training import LayoutRequests
from unified_ckpt.files.storage import Location

LOCK_FILE = "run.lock"
RESOLVED_FILE = "config.resolved.toml"

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class RunFolder:
    """A run's folder that this process holds.

    Attributes:
        resolved: the job's file with every key that has a value.
    """

    resolved: Path
    record: RunRecord
    has_ended: bool = False

    def end(self, reason: str) -> None:
        """Write down how the run ended; what is said first stands."""
        if not self.has_ended:
            try:
                self.record.end(reason)
            except OSError as error:  # what the run itself has to say comes first
                logger.warning("warning: run.json does not say how the run ended: %s", error)
        self.has_ended = True


@contextmanager
def run_folder(
    config: Config, source: Path | Location | None, *, command: str
) -> Iterator[RunFolder]:
    """Make and hold the run's folder; write `config.resolved.toml` and an entry of `run.json`.

    It is `train.output_dir`, or `log.dir` where that is given.

    Args:
        source: the checkpoint that the job goes on from.
        command: what was typed.

    Raises:
        BlockingIOError: another job is in the folder.
        TrainValueError: `log.dir` is that of a run with other checkpoints.
        ValueError: another job has left checkpoints there since the folder was checked.
    """
    folder = config.log_folder
    folder.mkdir(parents=True, exist_ok=True)
    key = "train.output_dir" if config.log.dir is None else "log.dir"
    refusal = (
        f"{key}={folder} is in use by another moe-train; wait until that ends, or "
        "choose another folder"
    )
    with claimed(folder / LOCK_FILE, refusal):
        check_run_folders(config.local_folders, resuming=source is not None)
        # Before the file by which others find the job: what is asked from now on is asked of it.
        LayoutRequests(folder).forget()
        resolved = folder / RESOLVED_FILE
        if source is None and config.log.dir is not None:
            _check_metrics(config, resolved)
        resolved.write_text(dump_toml(config), encoding="utf-8")
        record = RunRecord(folder, _facts(config, source, command))
        held = RunFolder(resolved=resolved, record=record)
        try:
            yield held
        except BaseException as error:
            held.end(f"failed: {str(error).strip() or type(error).__name__}")
            raise
        held.end("finished")


def _check_metrics(config: Config, resolved: Path) -> None:
    """Refuse to begin anew where the metrics of a run with other checkpoints lie (ValueError)."""
    metrics = resolved.with_name(METRICS_FILE)
    place = next(line for line in dump_toml(config).splitlines() if line.startswith("output_dir"))
    if metrics.exists() and resolved.exists() and place not in resolved.read_text("utf-8"):
        raise TrainValueError(
            f"log.dir={config.log.dir} holds the metrics of a run with another train.output_dir, "
            f"which would be lost; choose another folder, or move {metrics} away"
        )


def _facts(config: Config, source: Path | Location | None, command: str) -> dict[str, object]:
    parallel, device = config.parallel, choose_device(config.train.device, config.world_size)
    is_cuda = device.type == "cuda"
    return {
        "command": command,
        "folder": os.getcwd(),
        "resumed_from": None if source is None else str(source),
        "layout": {"pp": parallel.pp, "dp": parallel.dp, "ep": parallel.ep},
        "device": torch.cuda.get_device_name(device) if is_cuda else "cpu",
        "cpu_cores": os.cpu_count(),
    }
