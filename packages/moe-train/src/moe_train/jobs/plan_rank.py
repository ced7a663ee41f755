"""The module that `moe-train plan` runs on each rank: two recorded steps on random tokens.

run(["plan.toml", "traces"], context)
"""

from pathlib import Path

import torch

from moe_train.config import load_config
from moe_train.jobs.plan import record_rank
from moe_train.rank import RankContext


# gate: same-name - what moe_train.rank calls in each module that ranks run
def run(argv: list[str], context: RankContext) -> None:
    """Record this rank's allocations. Collective over all ranks.

    Args:
        argv: the path of a config, and the folder for the traces.
        context: told the number of steps; a request to stop is ignored, since they are short.
    """
    config_file, folder = argv
    torch.set_num_threads(1)
    context.step = record_rank(load_config(Path(config_file)), Path(folder))
