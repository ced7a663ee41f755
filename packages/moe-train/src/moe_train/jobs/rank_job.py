"""The job module that `moe-train train` runs on each rank: read the config and train.

run(["runs/a/config.resolved.toml", "latest"], stop)
run(["job.toml", "", "train.max_steps=50"], stop)
"""

import os
import sys
from pathlib import Path

import torch

from moe_train.config import load_config
from moe_train.jobs import job
from moe_train.launch import StopFlag


def run(argv: list[str], stop: StopFlag) -> None:
    """Train on this rank. Collective over all ranks.

    Args:
        argv: the path of a config, what to resume ("", "latest" or a folder), and overrides.
        stop: asked after every step.
    """
    config_file, resume, *overrides = argv
    config = load_config(Path(config_file), overrides)
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(config.train.threads_per_rank or max(1, num_cores() // local_ranks))
    job.train(config, resume, stop)


def current_step() -> int:
    """Finished steps of this process's job."""
    return job.current_step()


def num_cores() -> int:
    """Cores that this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
