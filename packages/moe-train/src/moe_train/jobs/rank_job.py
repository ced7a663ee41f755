"""The module that `moe-train train` runs on each rank: read the config and train.

run(["runs/a/config.resolved.toml", "latest"], context)
run(["job.toml", "", "train.max_steps=50"], context)
"""

from pathlib import Path

from moe_train.config import load_config
from moe_train.jobs import job
from moe_train.parallel import set_num_threads
from moe_train.rank import RankContext


# gate: same-name - what moe_train.rank calls in each module that ranks run
def run(argv: list[str], context: RankContext) -> None:
    """Train on this rank. Collective over all ranks.

    Args:
        argv: the path of a config, what to resume ("", "latest" or a folder), and overrides.
        context: asked after every step whether to stop, and told how many are finished.
    """
    config_file, resume, *overrides = argv
    config = load_config(Path(config_file), overrides)
    set_num_threads(config.train.threads_per_rank)
    job.train(config, resume, context)
