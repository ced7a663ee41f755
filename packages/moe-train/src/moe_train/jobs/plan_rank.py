"""The job module that `moe-train plan` runs on each rank: two recorded steps on random tokens.

run(["plan.toml", "traces"], stop)
"""

from pathlib import Path

import torch

from moe_train.config import load_config
from moe_train.jobs.plan import record_rank
from moe_train.launch import StopFlag


def run(argv: list[str], stop: StopFlag) -> None:
    """Record this rank's allocations. Collective over all ranks.

    Args:
        argv: the path of a config, and the folder for the traces.
        stop: not asked; two steps are soon over.
    """
    config_file, folder = argv
    torch.set_num_threads(1)
    record_rank(load_config(Path(config_file)), Path(folder))


def current_step() -> int:
    """A plan has no steps to report."""
    return 0
