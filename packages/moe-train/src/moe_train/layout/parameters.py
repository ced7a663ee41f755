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

from mesh_spmd import Box, ProcessMesh, Spec, choose_placements, local_box
from moe_train.errors import TrainValueError
from moe_train.layout.stored_form import StoredForm, stored_form
from moe_train.model import DecoderConfig
from unified_ckpt import Box as StoredBox
from unified_ckpt import Shard

_EXPERTS = ".mlp.experts."


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

    Only dim 0 of experts is sharded, and a stored form leaves that dim alone, so the placements
    are those of the stored form, too.
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

    def shared_out(self) -> "ParameterLayout":
        """How what is kept for updates lies where rows are shared out.

        Rows that several ranks of the stage hold are cut once more, along dp and ep, so that each
        is updated by one rank.
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
            self._held[rank] = shape, tuple(_cuts(self, rank))
        return self._held[rank]


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
) -> dict[str, ParameterLayout]:
    """The layout of every tensor of a pipeline stage, in the order of its state dict.

    Experts are sharded over ep on dim 0, everything else is replicated over dp x ep.

    Args:
        stage: the module with this rank's shards.
        stage_mesh: the ("dp", "ep") mesh of the ranks of this stage.
        expert_parts: experts of each rank along ep, for layers that do not have equal parts.
    """
    layouts = {}
    for name, tensor in stage_tensors(stage).items():
        shape, spec = tuple(tensor.shape), Spec.from_axes(stage_mesh, {})
        if is_expert(name):
            shape = (config.num_experts, *shape[1:])
            spec = _spec_of_experts(shape, stage_mesh, (expert_parts or {}).get(_layer_of(name)))
        layouts[name] = ParameterLayout(
            name=name,
            global_shape=shape,
            spec=spec,
            form=stored_form(config.model_type, name, shape),
        )
    return layouts


def _cut_finer(spec: Spec) -> Spec:
    cut = [axis for axis in spec.mesh.axis_names if spec.placement(axis) == DimShard(0)]
    every = dict.fromkeys(spec.mesh.axis_names, DimShard(0))
    return Spec.from_axes(spec.mesh, every, order=cut, sizes=dict(spec.sizes))


def _layer_of(name: str) -> int:
    """The number of the layer that a parameter of a layer belongs to."""
    return int(name.partition(".layers.")[2].partition(".")[0])


def _spec_of_experts(
    shape: tuple[int, ...], stage_mesh: ProcessMesh, parts: tuple[int, ...] | None
) -> Spec:
    if parts is not None:
        return Spec.from_axes(stage_mesh, {"ep": DimShard(0)}, sizes={"ep": parts})
    return Spec(stage_mesh, choose_placements(shape, stage_mesh, shard={"ep": 0}, strict=True))


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
    held = local_box(layout.form.shape, layout.spec, rank)
    for view in layout.form.views:
        part = _overlap(held, Box(view.offset, view.shape))
        if part is None:
            continue
        dropped = len(view.shape) - len(view.stored_shape)
        shape = part.shape[dropped:]
        offset = _difference(part.offset, view.offset)[dropped:]
        yield _Cut(
            key=view.key,
            slices=Box(_difference(part.offset, held.offset), part.shape).slices(),
            shape=shape if dropped else None,
            box=StoredBox(tuple(view.stored_shape), offset, shape),
        )


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
