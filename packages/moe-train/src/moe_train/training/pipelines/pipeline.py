"""What the ranks of a pipeline hold and do: layers of each stage, and the schedule of a step.

A schedule with a name follows from the configuration alone. `auto` is planned from what each stage
is measured to take on this machine, under `parallel.memory_limit_mib`; the ranks share what they
have measured, so that all find the same plan.

Stages have equal numbers of layers, or as equal work as layers allow. Work is counted, not
measured: the weights that a token passes through, and what attention does with the other tokens of
its sequence. The head and the layers of multi-token prediction stand behind the last layer; the
embedding is a lookup.

    layers = layers_of_stages(config, model)
    schedule = training_schedule(config, stages, parallel)
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import torch.distributed as dist

from moe_pipeline import Schedule
from moe_pipeline.executor import measure_costs
from moe_pipeline.schedules import (
    SCHEDULES,
    Kind,
    StageCosts,
    add_transfers,
    interleaved_1f1b,
    interleaved_forward_then_backward,
    interleaved_zero_bubble,
    looped_bfs,
    plan,
)
from moe_train.config import Config
from moe_train.errors import TrainValueError
from moe_train.layout import is_expert
from moe_train.model import (
    DecoderConfig,
    DecoderStage,
    StageOptions,
    Target,
    stage_layers,
)
from moe_train.parallel import Parallel
from moe_train.training.pipelines.rank_stages import RankStages

_ROUNDS = 2  # of a measurement; the shortest counts
_LOOPED = {
    "interleaved_1f1b": interleaved_1f1b,
    "interleaved_forward_then_backward": interleaved_forward_then_backward,
    "interleaved_zero_bubble": interleaved_zero_bubble,
    "looped_bfs": looped_bfs,
}


def layers_of_stages(config: Config, model: DecoderConfig) -> list[range]:
    """The layers of every stage of the pipeline; pure."""
    count = config.parallel.num_stages
    if config.parallel.layer_split == "cost":
        return split_layers(layer_work(model, config.data.sequence_length), count)
    return [stage_layers(model.num_hidden_layers, count, stage) for stage in range(count)]


def unmeasured_schedule(config: Config) -> Schedule:
    """The schedule with its name, or for `auto` one on the same ranks; pure."""
    name, pp = config.parallel.schedule, config.parallel.pp
    count = config.train.gradient_accumulation_steps
    if name in _LOOPED:
        return _LOOPED[name](pp, count, stages_per_rank=config.parallel.per_rank)
    return SCHEDULES["zbv" if name == "auto" else name](pp, count)


def training_schedule(config: Config, stages: RankStages, parallel: Parallel) -> Schedule:
    """What the pipeline's ranks do in a step. For `auto` collective over all ranks.

    Raises:
        ValueError: one microbatch does not fit in `parallel.memory_limit_mib`.
    """
    if config.parallel.schedule != "auto":
        return unmeasured_schedule(config)
    return schedule_of_costs(config, _shared_costs(config, stages, parallel))


def schedule_of_costs(config: Config, costs: Sequence[StageCosts]) -> Schedule:
    """What `auto` plans for stages that take this; pure.

    Raises:
        ValueError: as `training_schedule`.
    """
    pp, count = config.parallel.pp, config.train.gradient_accumulation_steps
    pairs = [costs[rank].activation_bytes + costs[-1 - rank].activation_bytes for rank in range(pp)]
    limit = config.parallel.memory_limit_mib
    cap = count * max(pairs) if limit is None else int(limit * 2**20)
    if cap < max(pairs):
        raise TrainValueError(
            f"parallel.memory_limit_mib={limit:g}, but the activations of one microbatch take "
            f"{max(pairs) / 2**20:.1f} MiB on a rank; raise it, use train.recompute, more "
            "microbatches (train.gradient_accumulation_steps), or more ranks"
        )
    return replace(plan(costs, pp, count, cap, folded=True), name="auto")


def forwards_of(schedule: Schedule) -> Schedule:
    """The forwards of a schedule, on the same ranks: evaluation."""
    rows = [[action for action in row if action.kind is Kind.FORWARD] for row in schedule.ranks]
    return add_transfers(
        Schedule(
            name=f"forwards of {schedule.name}",
            num_stages=schedule.num_stages,
            num_microbatches=schedule.num_microbatches,
            ranks=tuple(map(tuple, rows)),
            has_backward=False,
        )
    )


def counted_costs(config: Config, stages: RankStages, parallel: Parallel) -> dict[int, StageCosts]:
    """Of each stage here the bytes of a microbatch, and as its times its work: nothing is timed.

    A weight takes part in three products: forward, input gradient, weight gradient. Collective over
    the ranks of each stage, unless this rank is alone.
    """
    work = layer_work(stages.config, config.data.sequence_length)
    found = {}
    for number, stage in stages.by_number.items():
        one = sum(work.layers[layer] for layer in stage.options.layers)
        one += work.behind if stage.options.last else 0.0
        bytes_only = _measured(config, stage, parallel, rounds=0)
        found[number] = replace(
            bytes_only, forward_s=one, input_gradient_s=one, weight_gradient_s=one
        )
    return found


def _shared_costs(config: Config, stages: RankStages, parallel: Parallel) -> list[StageCosts]:
    """Of every stage what the slowest of its ranks, and the fullest, has measured. Collective."""
    cards = [parallel.device] if parallel.device.type == "cuda" else []
    with torch.random.fork_rng(cards):
        own = {
            number: _measured(config, stage, parallel) for number, stage in stages.by_number.items()
        }
    stages.take_record()
    for name, buffer in stages.named_buffers():
        if name.endswith(".tokens_per_expert"):
            buffer.zero_()
    told: list[dict[int, StageCosts] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(told, own)
    found: dict[int, list[StageCosts]] = {}
    for costs in filter(None, told):
        for number, cost in costs.items():
            found.setdefault(number, []).append(cost)
    return [_worst(found[number]) for number in sorted(found)]


def _measured(
    config: Config, stage: DecoderStage, parallel: Parallel, *, rounds: int = _ROUNDS
) -> StageCosts:
    """Of one stage, on a microbatch of random tokens. Collective over the ranks of the stage."""
    count = config.train.gradient_accumulation_steps
    rows = config.train.global_batch_size // (count * parallel.num_sample_ranks)
    shape = (rows, config.data.sequence_length)
    tokens = torch.randint(0, stage.config.vocab_size, shape, device=parallel.device)
    positions = torch.arange(shape[1], device=parallel.device).expand(shape).contiguous()
    first = tokens
    if not stage.options.first:
        size, dtype = stage.config.hidden_size, stage.options.dtype
        own = parallel.num_positions(shape[1])
        first = torch.randn(rows, own, size, device=parallel.device, dtype=dtype)
    return measure_costs(
        stage.train(),
        (first, positions),
        target=Target(tokens, 1.0 / tokens.numel(), tokens) if stage.options.last else None,
        is_first=stage.options.first,
        split=True,
        rounds=rounds,
    )


def _worst(costs: list[StageCosts]) -> StageCosts:
    """The longest times and the most bytes."""
    return StageCosts(
        forward_s=max(cost.forward_s for cost in costs),
        input_gradient_s=max(cost.input_gradient_s for cost in costs),
        weight_gradient_s=max(cost.weight_gradient_s for cost in costs),
        activation_bytes=max(cost.activation_bytes for cost in costs),
        weight_gradient_bytes=max(cost.left_for_weights for cost in costs),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWork:
    """Products for a token in a forward: of each layer, and behind the last one."""

    layers: tuple[float, ...]
    behind: float


def layer_work(config: DecoderConfig, sequence_length: int) -> LayerWork:
    """The work of a decoder's parts on a token of sequences of that length."""
    layers = range(config.num_hidden_layers)
    options = StageOptions(layers=layers, first=True, last=True, device=torch.device("meta"))
    found = dict.fromkeys((*layers, *config.mtp_layers), 0.0)
    share = config.moe.num_experts_per_tok / max(config.num_experts, 1)
    for name, parameter in DecoderStage(config, options).named_parameters():
        kind, _, rest = name.removeprefix("model.").partition(".")
        if kind == "layers" and parameter.dim() > 1:
            used = share if is_expert(name) else 1.0
            found[int(rest.partition(".")[0])] += used * parameter.numel()
    for layer in found:
        # Half of the tokens are earlier ones; scores, and what they weigh.
        window = config.window(layer) if layer in layers else None
        seen = sequence_length / 2 if window is None else min(window, sequence_length / 2)
        found[layer] += 2 * seen * config.hidden_size
    head = float(config.vocab_size * config.hidden_size)
    behind = head + sum(found[layer] + head for layer in config.mtp_layers)
    return LayerWork(layers=tuple(found[layer] for layer in layers), behind=behind)


def split_layers(work: LayerWork, num_stages: int) -> list[range]:
    """Layers of each stage, at least one, so that the dearest stage is as cheap as can be.

    Among the best ones that whose squares of work sum up to least: stages are alike otherwise, too.
    """
    sums = [0.0]
    for cost in work.layers:
        sums.append(sums[-1] + cost)
    count = len(work.layers)

    def cost_of(first: int, end: int) -> float:
        return sums[end] - sums[first] + (work.behind if end == count else 0.0)

    # By the number of layers that the stages so far have: dearest, squares, where each begins.
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for stage in range(num_stages):
        following: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for end in range(stage + 1, count - (num_stages - stage - 1) + 1):
            candidates = (
                (max(dearest, cost), squares + cost * cost, (*starts, first))
                for first, (dearest, squares, starts) in best.items()
                if first < end
                for cost in (cost_of(first, end),)
            )
            found = min(candidates, default=None)
            if found is not None:
                following[end] = found
        best = following
    starts = [*best[count][2], count]
    return [range(first, end) for first, end in pairwise(starts)]
