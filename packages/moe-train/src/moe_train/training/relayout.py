"""A job's state from one layout to another, in memory, between two steps.

mesh-spmd plans which bytes of which tensor go from where to where, and comm-collectives carries
them. Nothing is gathered and no file is written.

Invariant: every bit is where a checkpoint of the old layout, loaded in the new one, would put it.

    training, moved = relaid_out(config, parallel, training, updates=100)
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from comm_collectives.collectives.drop_in import all_to_all_single
from mesh_spmd import TensorSpec, execute, plan_reshard
from moe_train.config import Config
from moe_train.errors import MoeTrainError
from moe_train.parallel import Parallel
from moe_train.slices import slices_of
from moe_train.training.build import Training, build_training

_WEIGHTS, _MASTERS, _AVERAGE = "weights", "master weights", "moving average"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """What one pipeline stage holds: by kind and name how each tensor lies on the stage's ranks."""

    tensors: dict[str, dict[str, TensorSpec]]
    late: dict[str, int]


def relaid_out(
    config: Config, parallel: Parallel, training: Training, *, updates: int
) -> tuple[Training, str]:
    """Return the training in the layout of `config`, with the state of `training`. Collective.

    `training` must not be used any more, but for its checkpointer, which goes on with the new one.
    Both are held while tensors move: a rank needs room for its state in both layouts.

    Args:
        config: the job, with the axes of the new layout.
        parallel: this rank's place in it.
        updates: how many updates of the weights were made.

    Returns:
        The training, and a line that says what moved.

    Raises:
        MoeTrainError: the layouts have not the same tensors.
        SaveError: this rank has no memory for saves beside training.
    """
    started = time.perf_counter()
    checkpointer = training.checkpointer
    held = _tensors(training) | {_AVERAGE: checkpointer.read_average()}
    before = _stages(training, held)
    cards = [parallel.device] if parallel.device.type == "cuda" else []
    with torch.random.fork_rng(cards):  # weights are drawn, and then overwritten
        made = build_training(config, parallel, former=training)
    room = _tensors(made) | {_AVERAGE: made.checkpointer.room_for_average()}
    after = _stages(made, room)
    most_bytes = 0
    # A stage may have none of a kind, such as moments of Muon; its ranks take part all the same.
    for kind in sorted({kind for stage in (*before, *after) for kind in stage.tensors}):
        tensors = held.get(kind, {}), room.get(kind, {})
        most_bytes += _move(kind, (before, after), tensors, config, parallel)
    optimizer = made.runner.optimizer
    late = {name: count for stage in before for name, count in stage.late.items()}
    optimizer.set_step(updates, {n: late[n] for n in optimizer.updated() if n in late})
    checkpointer.take_over(made.checkpointer, room[_AVERAGE])
    seconds = time.perf_counter() - started
    moved = f"the busiest rank has received {most_bytes:,} bytes, in {seconds:.1f} s"
    return replace(made, checkpointer=checkpointer), moved


def _tensors(training: Training) -> dict[str, dict[str, Tensor]]:
    """All that this rank keeps between steps, by kind and name."""
    optimizer = training.runner.optimizer
    found = {_WEIGHTS: dict(training.checkpointer.parameters), _MASTERS: dict(optimizer.master)}
    return found | optimizer.moments()


def _stages(training: Training, held: Mapping[str, Mapping[str, Tensor]]) -> list[_Stage]:
    """What every stage holds, told by one rank of each. Collective over all ranks."""
    checkpointer, parallel = training.checkpointer, training.parallel
    layouts = {_WEIGHTS: checkpointer.layouts, _AVERAGE: checkpointer.layouts_of_average}

    def lies(kind: str, name: str, tensor: Tensor) -> TensorSpec:
        layout = layouts.get(kind, checkpointer.layouts_of_updates)[name]
        return TensorSpec(layout.global_shape, tensor.dtype, layout.spec)

    own = _Stage(
        tensors={
            kind: {name: lies(kind, name, tensor) for name, tensor in tensors.items()}
            for kind, tensors in held.items()
        },
        late=dict(training.runner.optimizer.late),
    )
    told: list[_Stage | None] = [None] * dist.get_world_size()
    dist.all_gather_object(told, own if parallel.data_rank == 0 else None)
    return [stage for stage in told if stage is not None]


def _move(
    kind: str,
    stages: tuple[list[_Stage], list[_Stage]],
    tensors: tuple[Mapping[str, Tensor], Mapping[str, Tensor]],
    config: Config,
    parallel: Parallel,
) -> int:
    """Fill this rank's tensors of one kind; return the bytes that the busiest rank received.

    An embedding that two stages share is taken from the first one, and brought to both. States that
    live in the host's memory travel from device to device, a few at a time.
    """
    before, after = stages
    held, room = tensors
    lies: dict[str, TensorSpec] = {}
    for stage in reversed(before):
        lies |= stage.tensors.get(kind, {})
    wanted = [(name, spec) for stage in after for name, spec in stage.tensors.get(kind, {}).items()]
    missing = sorted({name for name, _ in wanted} ^ lies.keys())
    if missing:
        raise MoeTrainError(f"one of two layouts alone has {kind} of {', '.join(missing[:8])}")
    parts = [slice(None)]
    if config.train.offload_optimizer:
        parts = slices_of([math.prod(spec.shape) for _, spec in wanted])
    most_bytes = 0
    for part in parts:
        sources = [lies[name] for name, _ in wanted[part]]
        plan = plan_reshard(sources, [spec for _, spec in wanted[part]])
        local = [
            _in_halves(held[name].to(parallel.device), spec)
            if spec.mesh.position(parallel.rank) is not None
            else None
            for (name, _), spec in zip(wanted[part], sources, strict=True)
        ]
        moved = execute(plan, local, exchange=all_to_all_single)
        for (name, _), found in zip(wanted[part], moved, strict=True):
            if found is not None:
                room[name].copy_(found.view_as(room[name]))
        most_bytes += plan.busiest_bytes[0]
    return most_bytes


def _in_halves(tensor: Tensor, spec: TensorSpec) -> Tensor:
    """Gate and up projections that lie behind each other as halves, where the layout has such."""
    return tensor.unflatten(1, (2, -1)) if len(spec.shape) > tensor.dim() else tensor
