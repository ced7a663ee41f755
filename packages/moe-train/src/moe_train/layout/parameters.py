"""Where every parameter lies: which box of it this rank holds, and under which keys it is stored.

Two mappings meet here. mesh-spmd says which box of a parameter a rank holds; `stored_form` says
which stored keys (transformers' names) it consists of. Their intersections are what a checkpoint
reads and writes, for weights and for everything shaped alike.

    stored = stored_tensors(layouts, {"model.norm.weight": tensor}, rank=0)
    load(stored.shards, checkpoint_id=folder)
    stored.write_back()              # for the tensors whose stored layout is another one
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor, nn
from torch.distributed.tensor import Shard as DimShard

from mesh_spmd import Box, ProcessMesh, Spec, local_box
from moe_train.errors import TrainValueError
from moe_train.layout.stored_form import StoredForm, stored_form
from moe_train.layout.tensor_cuts import (
    BY_TOKEN,
    EXPERT_AXIS,
    TENSOR_AXIS,
    expert_spec,
    tensor_cut,
    tensor_spec,
)
from moe_train.model import DecoderConfig
from unified_ckpt import Box as StoredBox
from unified_ckpt import Shard

_EXPERTS = ".mlp.experts."
_GATE_AND_UP = ".experts.gate_up_proj"


@dataclass(frozen=True, slots=True)
class _Cut:
    """A part of what a rank holds that is a box of one stored tensor."""

    key: str
    slices: tuple[slice, ...]
    shape: tuple[int, ...] | None  # None: that of the slices
    box: StoredBox


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterLayout:
    """One parameter or buffer: its shape over all ranks, its placements, and its stored form.

    Gate and up projections of experts, one tensor in memory, are halves of it: `global_shape` is
    [E, 2, H, d], so that what ranks that share out the inner width hold is a box. A stored form
    leaves the dims alone that are sharded: dim 0 of experts, and what ranks share out of widths,
    which is stored as it is. So the placements are those of the stored form, too.
    """

    name: str
    global_shape: tuple[int, ...]
    spec: Spec
    form: StoredForm
    _held: dict[int, tuple[tuple[int, ...], tuple[_Cut, ...]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def first_row(self, rank: int) -> int:
        """Where a rank's part begins along dim 0, as for experts the number of its first one."""
        return local_box(self.global_shape, self.spec, rank).offset[0]

    def first_column(self, rank: int) -> int:
        """Where a rank's part begins along dim 1 of a matrix."""
        offset = local_box(self.global_shape, self.spec, rank).offset
        return offset[1] if len(offset) == 2 else 0

    @property
    def is_tensor_parallel(self) -> bool:
        """Whether tensor-parallel ranks share it out."""
        return TENSOR_AXIS in self.spec.mesh.axis_names

    def shared_out(self) -> "ParameterLayout":
        """How what is kept for updates lies where rows are shared out.

        Rows that several ranks of the stage hold are cut once more among these, so that each is
        updated by one rank.
        """
        return replace(self, spec=_cut_finer(self.spec))

    def whole(self) -> "ParameterLayout":
        """As where every rank of the stage holds all of it."""
        return replace(self, spec=Spec.from_axes(self.spec.mesh, {}))

    def num_rows(self, rank: int) -> int:
        """How many indices of dim 0 a rank has."""
        return local_box(self.global_shape, self.spec, rank).shape[0]

    def held(self, rank: int) -> tuple[tuple[int, ...], tuple[_Cut, ...]]:
        """The shape of a rank's part, and its boxes of stored tensors; worked out once."""
        if rank not in self._held:
            shape = local_box(self.global_shape, self.spec, rank).shape
            if self.has_halves:
                shape = (shape[0], shape[1] * shape[2], *shape[3:])
            self._held[rank] = shape, tuple(_cuts(self, rank))
        return self._held[rank]

    @property
    def has_halves(self) -> bool:
        """Whether memory has gate and up projections behind each other along dim 1."""
        return len(self.global_shape) > len(self.form.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensors:
    """A rank's tensors as boxes of stored tensors.

    Attributes:
        shards: what to save, or to load into.
        rearranged: (tensor, its copy in the stored layout, its layout) where that is another one;
            all other shards are views.
    """

    shards: list[Shard]
    rearranged: list[tuple[Tensor, Tensor, ParameterLayout]]

    def write_back(self) -> None:
        """Bring what the shards hold now into the tensors; needed after a load."""
        for tensor, stored, layout in self.rearranged:
            tensor.copy_(layout.form.to_memory(stored))


def is_expert(name: str) -> bool:
    """Whether the parameter belongs to routed experts and is sharded over ep."""
    return _EXPERTS in name


def stage_tensors(stage: nn.Module) -> dict[str, Tensor]:
    """Name -> tensor of all that a checkpoint keeps of a stage: parameters and router biases."""
    return dict(stage.state_dict())


def parameter_layouts(
    stage: nn.Module,
    config: DecoderConfig,
    stage_mesh: ProcessMesh,
    expert_parts: Mapping[int, tuple[int, ...]] | None = None,
    tp: int = 1,
    etp: int = 1,
    *,
    is_whole: bool = False,
) -> dict[str, ParameterLayout]:
    """The layout of every tensor of a pipeline stage, in the order of its state dict.

    Experts are sharded over ep on dim 0 and over etp by their inner width, what tensor-parallel
    ranks share out over these, and everything else is replicated over dp x ep.

    Args:
        stage: the module with this rank's shards.
        stage_mesh: the ("dp", "ep") mesh of the ranks of this stage.
        expert_parts: experts of each rank along ep, for layers that do not have equal parts.
        tp: ranks that share heads, widths and the vocabulary; the tensors of the stage are those
            of one of them, or whole ones (`is_whole`).
        etp: ranks that share each expert, likewise.
    """
    layouts = {}
    for name, tensor in stage_tensors(stage).items():
        shape, spec = tuple(tensor.shape), Spec.from_axes(stage_mesh, {})
        if is_expert(name):
            parts = (expert_parts or {}).get(_layer_of(name))
            shape = _shape_of_experts(
                name, (config.num_experts, *shape[1:]), 1 if is_whole else etp
            )
            spec = expert_spec(stage_mesh, parts, etp)
        elif (dim := tensor_cut(name, config, tp)) is not None:
            if not is_whole:
                count = config.vocab_size if name in BY_TOKEN else shape[dim] * tp
                shape = (*shape[:dim], count, *shape[dim + 1 :])
            spec = tensor_spec(stage_mesh, dim, shape, tp)
        layouts[name] = ParameterLayout(
            name=name,
            global_shape=shape,
            spec=spec,
            form=stored_form(config.model_type, name, _joined(name, shape)),
        )
    return layouts


def _shape_of_experts(name: str, shape: tuple[int, ...], etp: int) -> tuple[int, ...]:
    """Of all ranks: [E, 2, H, d] of gate and up, [E, d, H] of down; biases are never shared out."""
    if name.endswith(_GATE_AND_UP):
        return (shape[0], 2, shape[1] // 2 * etp, *shape[2:])
    return (*shape[:2], shape[2] * etp) if len(shape) == 3 else shape


def _joined(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape with the halves behind each other."""
    return (shape[0], 2 * shape[2], shape[3]) if name.endswith(_GATE_AND_UP) else shape


def _cut_finer(spec: Spec) -> Spec:
    cut = [axis for axis in spec.mesh.axis_names if spec.placement(axis) == DimShard(0)]
    # What is cut along another dim stays so.
    others = {axis: spec.placement(axis) for axis in spec.mesh.axis_names}
    every = {a: p if isinstance(p, DimShard) else DimShard(0) for a, p in others.items()}
    return Spec.from_axes(spec.mesh, every, order=cut, sizes=dict(spec.sizes))


def _layer_of(name: str) -> int:
    """The number of the layer that a parameter of a layer belongs to."""
    return int(name.partition(".layers.")[2].partition(".")[0])


def single_rank_layouts(stage: nn.Module, config: DecoderConfig) -> dict[str, ParameterLayout]:
    """The layouts of a module that one rank, number 0, holds whole."""
    return parameter_layouts(stage, config, ProcessMesh((1, 1), ("dp", "ep")))


def stored_tensors(
    layouts: Mapping[str, ParameterLayout],
    tensors: Mapping[str, Tensor],
    rank: int,
    suffix: str = "",
) -> StoredTensors:
    """The stored form of this rank's tensors.

    Args:
        tensors: name -> this rank's part; parameters, moments or master weights.
        suffix: appended to the stored keys, such as "/exp_avg".

    Raises:
        ValueError: a tensor has not the shape of this rank's box.
    """
    shards: list[Shard] = []
    rearranged = []
    for name, given in tensors.items():
        layout, tensor = layouts[name], given.detach()
        held_shape, cuts = layout.held(rank)
        if tensor.shape != held_shape:
            raise TrainValueError(
                f"{name}: rank {rank} holds {tuple(tensor.shape)}, its layout says {held_shape}"
            )
        stored = layout.form.to_stored(tensor)
        if stored.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr():
            rearranged.append((tensor, stored, layout))
        for cut in cuts:
            local = stored[cut.slices]
            local = local if cut.shape is None else local.reshape(cut.shape)
            shards.append(Shard(key=cut.key + suffix, tensor=local, box=cut.box))
    return StoredTensors(shards=shards, rearranged=rearranged)


def _cuts(layout: ParameterLayout, rank: int) -> Iterator[_Cut]:
    """The boxes of stored tensors that lie in this rank's part, which has the stored layout."""
    for held, first in _stored_boxes(layout, rank):
        origin = _difference(held.offset, first)
        for view in layout.form.views:
            part = _overlap(held, Box(view.offset, view.shape))
            if part is None:
                continue
            dropped = len(view.shape) - len(view.stored_shape)
            shape = part.shape[dropped:]
            offset = _difference(part.offset, view.offset)[dropped:]
            yield _Cut(
                key=view.key,
                slices=Box(_difference(part.offset, origin), part.shape).slices(),
                shape=shape if dropped else None,
                box=StoredBox(tuple(view.stored_shape), offset, shape),
            )


def _stored_boxes(layout: ParameterLayout, rank: int) -> Iterator[tuple[Box, tuple[int, ...]]]:
    """The boxes of the stored layout that make up a rank's part, and where each begins in the part.

    One box, or where ranks share out the width of halves one of each.
    """
    shape = layout.form.shape
    if not layout.has_halves or EXPERT_AXIS not in layout.spec.mesh.axis_names:
        yield local_box(shape, layout.spec, rank), (0,) * len(shape)
        return
    held, (_, num_halves, whole, _) = (
        local_box(layout.global_shape, layout.spec, rank),
        layout.global_shape,
    )
    (first, _, column, _), (count, _, width, size) = held.offset, held.shape
    for half in range(num_halves):
        box = Box((first, half * whole + column, 0), (count, width, size))
        yield box, (0, half * width, 0)


def _difference(offset: tuple[int, ...], origin: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a - b for a, b in zip(offset, origin, strict=True))


def _overlap(held: Box, view: Box) -> Box | None:
    """The part that both have; None if there is none. An empty view lies in every box."""
    ends = [tuple(map(sum, zip(box.offset, box.shape, strict=True))) for box in (held, view)]
    lows = tuple(map(max, held.offset, view.offset))
    highs = tuple(map(min, *ends))
    if any(high <= low and n > 0 for low, high, n in zip(lows, highs, view.shape, strict=True)):
        return None
    return Box(lows, tuple(max(0, high - low) for low, high in zip(lows, highs, strict=True)))
