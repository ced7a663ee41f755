"""Where every parameter lies: which box of it this rank holds, and under which keys it is stored.

Two mappings meet here. mesh-spmd says which box of a parameter a rank holds; weight-convert says
which stored keys (transformers' names, one tensor per expert) a fused parameter consists of. Their
intersections are what a checkpoint reads and writes, for weights and for everything shaped alike.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from mesh_spmd import Box, ProcessMesh, Spec, choose_placements, local_box
from moe_train.model.config import Qwen3MoeConfig
from unified_ckpt import Shard
from weight_convert import StoredView, get_spec

_EXPERTS = ".mlp.experts."


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterLayout:
    """One parameter: its shape over all ranks, its placements, and its stored form."""

    name: str
    global_shape: tuple[int, ...]
    spec: Spec
    views: Sequence[StoredView]


def is_expert(name: str) -> bool:
    """Whether the parameter belongs to routed experts and is sharded over ep."""
    return _EXPERTS in name


def parameter_layouts(
    stage: nn.Module, config: Qwen3MoeConfig, stage_mesh: ProcessMesh
) -> dict[str, ParameterLayout]:
    """The layout of every parameter of a pipeline stage, in the order of its parameters.

    Experts are sharded over ep on dim 0, everything else is replicated over dp x ep.

    Args:
        stage: the module with this rank's shards.
        stage_mesh: the ("dp", "ep") mesh of the ranks of this stage.
    """
    family = get_spec("qwen3_moe")
    layouts = {}
    for name, parameter in stage.named_parameters():
        shape = tuple(parameter.shape)
        wanted: Mapping[str, int] = {}
        if is_expert(name):
            shape = (config.num_experts, *shape[1:])
            wanted = {"ep": 0}
        placements = choose_placements(shape, stage_mesh, shard=wanted, strict=True)
        layouts[name] = ParameterLayout(
            name=name,
            global_shape=shape,
            spec=Spec(stage_mesh, placements),
            views=family.stored_views(name, shape),
        )
    return layouts


def single_rank_layouts(stage: nn.Module, config: Qwen3MoeConfig) -> dict[str, ParameterLayout]:
    """The layouts of a module that one rank, number 0, holds whole."""
    return parameter_layouts(stage, config, ProcessMesh((1, 1), ("dp", "ep")))


def stored_shards(
    layout: ParameterLayout, tensor: Tensor, rank: int, suffix: str
) -> Iterator[Shard]:
    """The boxes of stored tensors that lie in this rank's part of a parameter.

    Args:
        tensor: this rank's part; a parameter, a moment or a master weight.
        suffix: appended to the stored keys, such as "/exp_avg".

    Returns:
        Shards whose tensors are views of `tensor`: writing to them fills it.

    Raises:
        ValueError: `tensor` has not the shape of this rank's box.
    """
    held = local_box(layout.global_shape, layout.spec, rank)
    if tuple(tensor.shape) != held.shape:
        raise ValueError(
            f"{layout.name}: rank {rank} holds {tuple(tensor.shape)}, its layout says {held.shape}"
        )
    for view in layout.views:
        part = _overlap(held, Box(view.offset, view.shape))
        if part is None:
            continue
        local = tensor[tuple(slice(o - h, o - h + n) for o, h, n in _zip(part, held))]
        dropped = len(view.shape) - len(view.stored_shape)
        inside = tuple(o - v for o, v in zip(part.offset, view.offset, strict=True))
        yield Shard(
            key=view.key + suffix,
            tensor=local.reshape(part.shape[dropped:]) if dropped else local,
            global_shape=tuple(view.stored_shape),
            offset=inside[dropped:],
        )


def _overlap(held: Box, view: Box) -> Box | None:
    lows, lengths = [], []
    for (a, n), (b, m) in zip(
        zip(held.offset, held.shape, strict=True),
        zip(view.offset, view.shape, strict=True),
        strict=True,
    ):
        low, high = max(a, b), min(a + n, b + m)
        if high <= low and m > 0:
            return None
        lows.append(low)
        lengths.append(max(0, high - low))
    return Box(tuple(lows), tuple(lengths))


def _zip(part: Box, held: Box) -> Iterator[tuple[int, int, int]]:
    return zip(part.offset, held.offset, part.shape, strict=True)
