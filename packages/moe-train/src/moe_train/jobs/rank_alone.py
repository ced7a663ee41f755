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
from moe_pipeline import Schedule
from moe_pipeline.schedules import StageCosts
from moe_train.config import Config
from moe_train.data import Batch
from moe_train.errors import MoeTrainError
from moe_train.jobs._torch_private import fake_store, know_fp8_products
from moe_train.parallel import Parallel, start
from moe_train.training import build_runner, build_stages, read_model_config
from moe_train.training.memory import LABELS, RankMemory
from moe_train.training.pipelines import counted_costs, schedule_of_costs

STEPS = 2  # the second one allocates what stays after the first


def record_alone(config: Config, rank: int, schedule: Schedule | None = None) -> TraceRecorder:
    """Build a rank and train it for two steps; what it allocated, by phase, labelled.

    Args:
        schedule: what `schedule_alone` returns, the same for all ranks; None: it is found here.

    Raises:
        MoeTrainError: this process is a rank of a job already.
        ValueError: the layout does not fit the model.
    """
    schedule = schedule or schedule_alone(config)
    config = _on_host(config)
    with _alone(config, rank) as parallel, ShapesOnly():
        return record_steps(config, parallel, schedule)


def schedule_alone(config: Config) -> Schedule | None:
    """What `parallel.schedule="auto"` plans where stages take the time of their counted work; None
    for a schedule with a name. Raises as `record_alone`.
    """
    if config.parallel.schedule != "auto":
        return None
    config, costs = _on_host(config), dict[int, StageCosts]()
    model, of_stage = read_model_config(config), config.world_size // config.parallel.pp
    for rank in range(0, config.world_size, of_stage):
        with _alone(config, rank) as parallel, ShapesOnly():
            costs |= counted_costs(config, build_stages(config, model, parallel), parallel)
    return schedule_of_costs(config, [costs[number] for number in sorted(costs)])


def record_steps(
    config: Config, parallel: Parallel, schedule: Schedule | None = None
) -> TraceRecorder:
    """Build this rank and train it on random tokens. Collective, unless it is alone."""
    model = read_model_config(config)
    # What lives in the host's memory, such as offloaded states, is not the device's.
    with TraceRecorder(device=parallel.device, labels=LABELS, all_threads=True) as recorder:
        memory = RankMemory(rank=parallel.rank, recorder=recorder)
        with memory.phase("build"):
            runner, _ = build_runner(config, model, parallel, {}, schedule)
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
    """Lines about keys of which threads or times decide what a rank allocates when."""
    lines = []
    moe, parallel = config.moe, config.parallel
    beside = {
        f"moe.dispatch_chunks={moe.dispatch_chunks}": moe.dispatch_chunks > 1,
        "moe.shared_expert_overlap=true": moe.shared_expert_overlap,
        "parallel.overlap_grad_reduce=true": parallel.overlap_grad_reduce,
        f"parallel.sharding={parallel.sharding}": parallel.sharding > 1,
    }
    if names := [name for name, is_on in beside.items() if is_on]:
        lines.append(
            f"{' and '.join(names)}: planned as if what travels beside computations had arrived "
            "before they begin; how they meet in time is not known"
        )
    if config.train.offload_activations:
        lines.append(
            "train.offload_activations=true: planned as if activations stayed on the device, since "
            "when their copies end is not known"
        )
    if config.parallel.schedule == "auto":
        lines.append(
            'parallel.schedule="auto" is planned from counted work; a job measures its stages, and '
            "may find another schedule"
        )
    return lines


def _on_host(config: Config) -> Config:
    """The same job on the host's operators, but for `planned_otherwise`."""
    return replace(config, train=replace(config.train, device="cpu"))


@contextmanager
def _alone(config: Config, rank: int) -> Iterator[Parallel]:
    """The groups of a rank of which the other ranks do not exist."""
    if dist.is_initialized():
        raise MoeTrainError(
            "a rank is planned in a process of its own, and this one is a rank of a job already"
        )
    know_fp8_products()
    dist.init_process_group("fake", store=fake_store(), rank=rank, world_size=config.world_size)
    try:
        parallel = start(config, is_alone=True)
        groups = (
            dist.group.WORLD,
            parallel.ep_group,
            parallel.etp_group,
            parallel.dp_group,
            parallel.data_group,
            parallel.dense_reduce_group,
            parallel.expert_reduce_group,
            parallel.embedding_group,
            parallel.cp_group,
            parallel.sequence_group,
            parallel.tp.group,
            parallel.tensor_group,
            parallel.tensor_reduce_group,
        )
        for group in filter(None, groups):
            stand_alone(group)
        yield parallel
    finally:
        dist.destroy_process_group()
