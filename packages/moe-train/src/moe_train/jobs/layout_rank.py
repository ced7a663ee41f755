"""The module that `moe-train verify-layouts` runs on each rank: the first steps of several jobs.

run(["jobs.json", "20"], context)       # jobs.json: [["job.toml", "figures.json"], ...]
"""

import json
from dataclasses import fields
from pathlib import Path

import torch.distributed as dist

from moe_train.cache import write_atomic
from moe_train.config import Config, load_config
from moe_train.init_source import readable_weights
from moe_train.parallel import Parallel, set_num_threads, start
from moe_train.rank import RankContext
from moe_train.training import TrainingLoop, build_training


def run(argv: list[str], context: RankContext) -> None:
    """Train each job for some steps; rank 0 writes their figures. Collective over all ranks.

    Args:
        argv: the path of a list of configs, each with the path where its figures go, and how many
            steps. All have as many ranks.
        context: told the finished steps; after a request to stop the job at hand has no figures.
    """
    listed, steps = argv
    set_num_threads()
    for job, figures in json.loads(Path(listed).read_bytes()):
        config = load_config(Path(job))
        parallel = start(config)
        found = _first_steps(config, parallel, int(steps), context)
        dist.barrier()
        if found is not None and parallel.rank == 0:
            write_atomic(Path(figures), json.dumps(found))
        end_groups(parallel)
        if found is None:
            break
    dist.barrier()
    dist.destroy_process_group()


def _first_steps(
    config: Config, parallel: Parallel, steps: int, context: RankContext
) -> dict[str, list[float]] | None:
    """The figures of each step; None: any rank was asked to stop."""
    training = build_training(config, parallel)
    if config.model.init_from is not None:
        source = Path(config.model.init_from)
        training.checkpointer.load_weights(readable_weights(source, config.data.cache_dir))
    loop = TrainingLoop.begin(config, training, None)
    losses, norms = [], []
    for result in loop.first_steps(steps, context):
        if result.stop_requested:
            return None
        context.step = loop.position.step
        losses.append(result.loss)
        norms.append(result.grad_norm)
    return {"loss": losses, "norm": norms}


def end_groups(parallel: Parallel) -> None:
    """End the groups that one layout has made; those of the next one are new."""
    values = [getattr(parallel, field.name) for field in fields(parallel)] + [parallel.tp.group]
    for group in {value for value in values if isinstance(value, dist.ProcessGroup)}:
        dist.destroy_process_group(group)
