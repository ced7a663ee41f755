"""Asking a running job for another layout: what does not fit is refused before the job hears of it.

request_relayout(Path("runs/job"), (2, 1, 4, 1, 1, 1), "load")    # `SIZES`; by load
"""

import dataclasses
from pathlib import Path

from moe_train.cache import claimed
from moe_train.config import load_config
from moe_train.errors import TrainValueError
from moe_train.jobs.job import check_model
from moe_train.jobs.run_folder import LOCK_FILE, RESOLVED_FILE
from moe_train.parallel import AXES, SIZES, Sizes
from moe_train.training import LayoutRequests, read_model_config


def request_relayout(folder: Path, sizes: Sizes, experts: str = "") -> str:
    """Ask the job in a run's folder for a layout; return what comes next.

    Args:
        sizes: pp, dp, ep, cp, tp and etp.
        experts: those of each rank along ep, as in "3,5", or "load"; "" for equal parts.

    Raises:
        ValueError: no job runs there, or it does not fit the layout.
    """
    resolved = folder / RESOLVED_FILE
    if not resolved.exists():
        raise TrainValueError(
            f"{folder} has no {RESOLVED_FILE}; name the run's folder: train.output_dir, or log.dir "
            "where that is given"
        )
    config = load_config(resolved)
    # After any step, since nobody knows which one the job has reached.
    asked, model = config.parallel.changed(1, sizes, experts), read_model_config(config)
    check_model(dataclasses.replace(config, parallel=asked), model)
    try:
        with claimed(folder / LOCK_FILE, "held"):
            parts = f" parallel.expert_parts='[\"{experts}\"]'" if "," in experts else ""
            raise TrainValueError(
                f"no moe-train runs in {folder}; start the job with "
                f"{_told(sizes, 'parallel.')}{parts} and --resume"
            )
    except BlockingIOError:  # by the job
        LayoutRequests(folder).ask(sizes, experts)
    parts = f" experts={experts}" if experts else ""
    return (
        f"asked {folder} for {_told(sizes)}{parts}: its log says when a "
        "step begins in it, or why it stays as it is"
    )


def _told(sizes: tuple[int, ...], before: str = "") -> str:
    told = zip(SIZES, sizes, strict=True)
    return " ".join(f"{before}{name}={n}" for name, n in told if name in AXES or n > 1)
