"""Who sums the gradients of which parameters, and who updates which of their rows.

finer = layouts_shared_out(layouts, rules)               # with parallel.sharding = 1
groups = parameter_groups(parameters, parallel, layouts, finer, has_copy=False)
blocks = stage_blocks(stages)                            # with parallel.sharding = 2
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Literal

import torch.distributed as dist
from torch import nn

from moe_pipeline.executor import TiedParameters
from moe_train.config import Config
from moe_train.layout import ParameterLayout, is_expert
from moe_train.model import EMBEDDING, DecoderConfig, DecoderStage
from moe_train.optim import (
    ParameterGroup,
    RowShares,
    StageBlocks,
    StateOptions,
    StochasticRounding,
    UpdateRule,
)
from moe_train.parallel import Parallel
from moe_train.training.pipelines import RankStages


def layouts_shared_out(
    layouts: Mapping[str, ParameterLayout], rules: Mapping[str, UpdateRule]
) -> dict[str, ParameterLayout]:
    """How that lies which ranks keep for updates of what they share out; pure.

    Muon needs whole matrices, so of what it updates only experts are shared out, one by one.
    """
    return {
        name: layout.shared_out()
        for name, layout in layouts.items()
        if name in rules and (is_expert(name) or rules[name].algorithm != "muon")
    }


def groups_of_job(
    config: Config,
    model: DecoderConfig,
    parameters: dict[str, nn.Parameter],
    parallel: Parallel,
    layouts: Mapping[str, ParameterLayout],
    shared_out: Mapping[str, ParameterLayout],
) -> list[ParameterGroup]:
    """`parameter_groups` as the job's keys want them."""
    has_copy = model.shares_embedding(config.train.mtp_loss_coef)
    level = config.parallel.sharding
    return parameter_groups(
        parameters, parallel, layouts, shared_out, has_copy=has_copy, level=level
    )


def parameter_groups(
    parameters: dict[str, nn.Parameter],
    parallel: Parallel,
    layouts: Mapping[str, ParameterLayout] = MappingProxyType({}),
    shared_out: Mapping[str, ParameterLayout] = MappingProxyType({}),
    *,
    has_copy: bool,
    level: int = 0,
) -> list[ParameterGroup]:
    """Which ranks sum the gradients of which parameters; the same groups on every rank of a stage.

    Collective over the ranks of the first and last stage, which compare a shared embedding.

    Dense parameters are reduced over dp x ep, experts over their own data parallel ranks, what
    tensor-parallel ranks share out over those with the same part, and an embedding that the first
    and the last stage hold over the ranks of both (with the same part).

    Args:
        layouts: of the parameters.
        shared_out: how that lies which is kept for the updates of what ranks share out.
        has_copy: the last stage uses the embedding.
        level: of sharding; from 2 on the gradients of these are shared out as well.
    """
    ends = parallel.embedding_group if has_copy else None
    names = {EMBEDDING} if ends is not None else set()
    copied = {name: p for name, p in parameters.items() if name in names}
    experts = {name: p for name, p in parameters.items() if is_expert(name)}
    cut = {name for name, layout in layouts.items() if layout.is_tensor_parallel} - names
    parts = {name: p for name, p in parameters.items() if name in cut}
    others = names | experts.keys() | parts.keys()
    dense = {name: p for name, p in parameters.items() if name not in others}
    summed = [
        (dense, parallel.dense_reduce_group, parallel.data_group),
        (experts, parallel.expert_reduce_group, parallel.dp_group),
    ]
    if parallel.tensor_reduce_group is not None and parallel.tensor_group is not None:
        summed.append((parts, parallel.tensor_reduce_group, parallel.tensor_group))
    groups = []
    for held, group, gathers in summed:
        for is_shared in (False, True):
            chosen = {n: p for n, p in held.items() if (n in shared_out) == is_shared}
            if chosen:  # an empty group would still be compared at each step
                shares = _shares(chosen, group, shared_out, gathers, is_alone=parallel.is_alone)
                groups.append(
                    ParameterGroup(
                        parameters=list(chosen.values()),
                        reduce_group=group,
                        shares=shares,
                        shares_gradients=level > 1,
                    )
                )
    if ends is not None and copied:
        holders, shared = parallel.tensor_group or parallel.data_group, list(copied.values())
        shares = _shares(copied, holders, shared_out, is_alone=parallel.is_alone)
        tied = TiedParameters(shared, group=ends)
        groups.append(
            ParameterGroup(parameters=shared, reduce_group=ends, tied=tied, shares=shares)
        )
    return groups


def stage_blocks(stages: RankStages) -> dict[int, StageBlocks]:
    """Of each stage of this rank its parameters, its layers, and its head where nothing shares it.

    Those of multi-token prediction belong to no block.
    """
    return {number: _blocks(stage) for number, stage in stages.by_number.items()}


def _blocks(stage: DecoderStage) -> StageBlocks:
    layers = [stage.model.layers[str(number)] for number in stage.options.layers]
    found = [(layer, list(layer.parameters())) for layer in layers]
    config, is_last = stage.config, stage.options.last
    is_shared = bool(config.tie_word_embeddings or config.mtp_layers)
    if is_last and not is_shared:
        norm: nn.Module = stage.model.norm
        found.append((norm, [*norm.parameters(), *stage.lm_head.parameters()]))
    return StageBlocks(
        module=stage,
        parameters=list(stage.parameters()),
        blocks=found,
        has_head=is_last and not is_shared,
        uses_rest_again=is_last and is_shared,
    )


def _shares(
    parameters: Mapping[str, nn.Parameter],
    group: dist.ProcessGroup,
    shared_out: Mapping[str, ParameterLayout],
    gather_group: dist.ProcessGroup | None = None,
    *,
    is_alone: bool,
) -> RowShares | None:
    """Who of the group updates which rows; None where there is nothing to share out."""
    ranks = dist.get_process_group_ranks(group)
    rows = {
        parameter: tuple(shared_out[name].num_rows(rank) for rank in ranks)
        for name, parameter in parameters.items()
        if name in shared_out
    }
    if not rows or len(ranks) == 1:
        return None
    return RowShares(group, rows, gather_group, is_alone=is_alone)


def state_options(
    config: Config,
    parameters: Iterable[str],
    layouts: Mapping[str, ParameterLayout],
    parallel: Parallel,
) -> StateOptions:
    """What this rank keeps for its updates, and where; weights are rounded by their place."""
    train, rank, rounding = config.train, parallel.rank, None
    if train.stochastic_rounding:
        lies = {name: layouts[name] for name in parameters}
        first = {name: (at.first_row(rank), at.first_column(rank)) for name, at in lies.items()}
        rounding = StochasticRounding(seed=train.seed, first=first)
    host: Literal["cpu", "meta"] = "meta" if parallel.is_alone else "cpu"
    return StateOptions(
        master_weights=train.master_weights,
        rounding=rounding,
        on_host=host if train.offload_optimizer else None,
    )
