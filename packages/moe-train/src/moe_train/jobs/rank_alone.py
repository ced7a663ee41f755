"""One rank of a job in this process, without the others, a GPU, or memory for its tensors.

The rank is built and trained by the code of a real run. Its process groups are of torch's "fake"
backend, other ranks answer as this one speaks to them, and floating tensors are shapes.

    recorder = record_alone(config, rank=3)

What is assumed: tokens choose experts evenly, every sequence is full, and operators are those of
the CPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist

from comm_collectives.simulation import stand_alone
from gpu_alloc.torch import ShapesOnly, TraceRecorder
from moe_train.config import Config
from moe_train.data import Batch
from moe_train.errors import MoeTrainError
from moe_train.jobs._torch_private import fake_store
from moe_train.parallel import Parallel, start
from moe_train.training import build_runner, read_model_config
from moe_train.training.memory import LABELS, RankMemory

STEPS = 2  # the second one allocates what stays after the first


def record_alone(config: Config, rank: int) -> TraceRecorder:
    """Build a rank and train it for two steps; what it allocated, by phase, labelled.

    Raises:
        MoeTrainError: this process is a rank of a job already.
        ValueError: the layout does not fit the model.
    """
    config = _on_host(config)
    with _alone(config, rank) as parallel, ShapesOnly():
        return record_steps(config, parallel)


def record_steps(config: Config, parallel: Parallel) -> TraceRecorder:
    """Build this rank and train it on random tokens. Collective, unless it is alone."""
    model = read_model_config(config)
    with TraceRecorder(labels=LABELS) as recorder:
        memory = RankMemory(rank=parallel.rank, recorder=recorder)
        with memory.phase("build"):
            runner, _ = build_runner(config, model, parallel, {})
        memory.label("parameters", runner.stages.parameters())
        memory.label("gradients", runner.gradients.held())
        for step in range(STEPS):
            with memory.step(step):
                batches = random_batches(config, model.vocab_size, parallel)
                runner.train(batches, lr=config.optimizer.lr, memory=memory)
    return recorder


def random_batches(config: Config, vocab_size: int, parallel: Parallel) -> list[Batch]:
    """The microbatches of a step, of random tokens; none on a rank that needs none."""
    if not (parallel.is_first or parallel.is_last):
        return []
    count = config.train.gradient_accumulation_steps
    rows = config.train.global_batch_size // (count * parallel.num_sample_ranks)
    length = config.data.sequence_length
    generator = torch.Generator().manual_seed(config.train.seed + parallel.sample_rank)
    batches = []
    for _ in range(count):
        tokens = torch.randint(0, vocab_size, (rows, length + 1), generator=generator)
        positions = torch.arange(length).expand(rows, length)
        ids, labels = tokens[:, :-1], tokens[:, 1:]
        batches.append(Batch(input_ids=ids, labels=labels, position_ids=positions))
    return batches


def planned_otherwise(config: Config) -> list[str]:
    """Lines about keys that a rank alone does not follow: what threads or times decide."""
    lines = []
    if config.parallel.overlap_grad_reduce:
        lines.append("planned without parallel.overlap_grad_reduce, whose buckets need memory too")
    if config.parallel.sharding > 2:
        lines.append("planned as parallel.sharding=2: whole parameters are counted all the time")
    if config.model.experts_fp8:
        lines.append("planned without model.experts_fp8, whose kernels only CUDA devices have")
    if config.moe.dispatch_chunks > 1:
        lines.append(
            f"moe.dispatch_chunks={config.moe.dispatch_chunks} is planned as if each chunk had "
            "arrived before the next one is sent; how they meet in time is not known"
        )
    if config.parallel.schedule == "auto":
        lines.append('planned as parallel.schedule="zbv": what auto makes follows measured times')
    return lines


def _on_host(config: Config) -> Config:
    """The same job on the host's operators, but for `planned_otherwise`."""
    sharding = min(config.parallel.sharding, 2)
    parallel = replace(config.parallel, overlap_grad_reduce=False, sharding=sharding)
    if parallel.schedule == "auto":
        parallel = replace(parallel, schedule="zbv")
    train, model = replace(config.train, device="cpu"), replace(config.model, experts_fp8=False)
    return replace(config, parallel=parallel, train=train, model=model)


@contextmanager
def _alone(config: Config, rank: int) -> Iterator[Parallel]:
    """The groups of a rank of which the other ranks do not exist."""
    if dist.is_initialized():
        raise MoeTrainError(
            "a rank is planned in a process of its own, and this one is a rank of a job already"
        )
    dist.init_process_group("fake", store=fake_store(), rank=rank, world_size=config.world_size)
    try:
        parallel = start(config)
        groups = (
            dist.group.WORLD,
            parallel.ep_group,
            parallel.dp_group,
            parallel.data_group,
            parallel.dense_reduce_group,
            parallel.expert_reduce_group,
            parallel.embedding_group,
            parallel.cp_group,
        )
        for group in filter(None, groups):
            stand_alone(group)
        yield replace(parallel, is_alone=True)
    finally:
        dist.destroy_process_group()
