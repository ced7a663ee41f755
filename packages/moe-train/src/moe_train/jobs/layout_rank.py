"""The module that `moe-train verify-layouts` runs on each rank: the first steps of a job.

run(["job.toml", "figures.json", "20"], context)
"""

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist

from moe_train.cache import write_atomic
from moe_train.config import load_config
from moe_train.init_source import readable_weights
from moe_train.parallel import start
from moe_train.rank import RankContext, num_cores
from moe_train.training import TrainingLoop, build_training


def run(argv: list[str], context: RankContext) -> None:
    """Train for some steps; rank 0 writes their figures. Collective over all ranks.

    Args:
        argv: the path of a config, where the figures go, and how many steps.
        context: told the finished steps; a request to stop is ignored, since they are short.
    """
    config_file, figures, steps = argv
    config = load_config(Path(config_file))
    torch.set_num_threads(max(1, num_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    training = build_training(config, start(config))
    if config.model.init_from is not None:
        source = Path(config.model.init_from)
        training.checkpointer.load_weights(readable_weights(source, config.data.cache_dir))
    loop = TrainingLoop.begin(config, training, None)
    losses, norms = [], []
    for result in loop.first_steps(int(steps)):
        context.step = loop.position.step
        losses.append(result.loss)
        norms.append(result.grad_norm)
    if training.parallel.rank == 0:
        write_atomic(Path(figures), json.dumps({"loss": losses, "norm": norms}))
    dist.barrier()
    dist.destroy_process_group()
