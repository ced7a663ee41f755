"""Which box of a parameter a rank holds, in every parallelism of MoE training; pure arithmetic.

Dense parameters and experts divide the same ranks differently: tp x cp x dp, and etp x ep x edp,
both inside each pipeline stage. So a parameter has one of two sharding groups; both are computed
from the rank alone, for thousands of ranks without a process.

    degrees = ParallelDegrees(world_size=8, tp=2, ep=4)
    rule = ParameterRule(expert=True, sharding="flat")
    rank_box(rule, (16, 64, 32), rank=3, degrees=degrees)
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch

from unified_ckpt.errors import CheckpointValueError, check_type
from unified_ckpt.geometry import Box, Shard

Sharding = Literal["none", "flat", "dim0", "owner"]
_T = TypeVar("_T")


# Boxes by key; or a function of (key, tensor) that returns a box, or shards under any keys (one
# fused tensor may be many stored ones), or None for a tensor that is whole. An optimizer state
# `KEY/moment1` that the layout does not know is placed like `KEY`.
Layout = Mapping[str, Box] | Callable[[str, torch.Tensor], Box | Sequence[Shard] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelDegrees:
    """Sizes of the parallel axes over `world_size` ranks; dp and edp are what is left.

    Ranks are numbered with tp (etp) fastest, then cp and dp (ep and edp), and pp slowest.

    Raises:
        CheckpointValueError: the degrees do not divide the ranks of a pipeline stage.
    """

    world_size: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1

    def __post_init__(self) -> None:
        degrees = {n: getattr(self, n) for n in ("world_size", "tp", "pp", "cp", "ep", "etp")}
        if min(degrees.values()) < 1:
            raise CheckpointValueError(f"every degree must be at least 1, got {degrees}")
        for names in (("tp", "cp"), ("etp", "ep")):
            product = self.pp * math.prod(degrees[name] for name in names)
            if self.world_size % product:
                raise CheckpointValueError(
                    f"pp x {' x '.join(names)} = {product} does not divide "
                    f"world_size={self.world_size}; got {degrees}"
                )

    @property
    def dp(self) -> int:
        """Data-parallel ranks of dense parameters."""
        return self.world_size // (self.pp * self.tp * self.cp)

    @property
    def edp(self) -> int:
        """Data-parallel ranks of experts."""
        return self.world_size // (self.pp * self.etp * self.ep)

    def coordinates(self, rank: int, *, expert: bool = False) -> dict[str, int]:
        """Return a rank's place on each axis: tp, cp, dp, pp; or etp, ep, edp, pp for experts."""
        if not 0 <= rank < self.world_size:
            raise CheckpointValueError(f"rank {rank} is not one of {self.world_size}")
        axes = (
            {"etp": self.etp, "ep": self.ep, "edp": self.edp}
            if expert
            else {"tp": self.tp, "cp": self.cp, "dp": self.dp}
        )
        place = {}
        for name, size in axes.items():
            place[name] = rank % size
            rank //= size
        return {**place, "pp": rank}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterRule:
    """How one tensor is divided.

    Attributes:
        expert: divided over ep (dim 0), etp and edp; otherwise over tp, cp and dp.
        pp_stage: the only pipeline stage that holds it; None for all.
        tp_dim: the dim that tp, or etp, cuts; None for replicated.
        tp_sizes: lengths of the parts of `tp_dim` where they are uneven in another way than
            `torch.chunk` cuts.
        ep_sizes: experts per ep rank, likewise.
        sharding: over dp x cp, or edp: `none` (replicas), `flat` (ranges of the row-major elements,
            stages 1 and 2), `dim0` (rows, as FSDP: stage 3), `owner` (whole, on rank `owner` of the
            sharding group modulo its size: stage 1 without split parameters).
        owner: see `sharding`.
    """

    expert: bool = False
    pp_stage: int | None = None
    tp_dim: int | None = None
    tp_sizes: tuple[int, ...] | None = None
    ep_sizes: tuple[int, ...] | None = None
    sharding: Sharding = "none"
    owner: int = 0


def rank_box(
    rule: ParameterRule, global_shape: Sequence[int], *, rank: int, degrees: ParallelDegrees
) -> Box | None:
    """Return what a rank holds of a tensor, None if nothing; the boxes of all ranks tile it.

    Raises:
        CheckpointValueError: the rule names a dim that the tensor lacks or sizes that do not fit,
            or the rank is none of `degrees`.
    """
    place = degrees.coordinates(rank, expert=rule.expert)
    if rule.pp_stage is not None and place["pp"] != rule.pp_stage:
        return None
    box = Box.whole(global_shape)
    tp, tp_index = (degrees.etp, place["etp"]) if rule.expert else (degrees.tp, place["tp"])
    if rule.expert:
        box = _divide(box, 0, rule.ep_sizes, degrees.ep, place["ep"])
    if rule.tp_dim is not None:
        box = _divide(box, rule.tp_dim, rule.tp_sizes, tp, tp_index)
    if rule.expert:
        group, index = degrees.edp, place["edp"]
    else:
        group, index = degrees.dp * degrees.cp, place["dp"] * degrees.cp + place["cp"]
    if rule.sharding == "flat":
        return box.flat_chunk(num=group, index=index)
    if rule.sharding == "dim0":
        return box.chunk(0, num=group, index=index) if box.local_shape else box
    if rule.sharding == "owner":
        return box if index == rule.owner % group else None
    return box


def _divide(box: Box, dim: int, sizes: tuple[int, ...] | None, num: int, index: int) -> Box:
    if sizes is None:
        return box.chunk(dim, num=num, index=index)
    if len(sizes) != num:
        raise CheckpointValueError(f"{len(sizes)} sizes {sizes} for {num} ranks along dim {dim}")
    return box.sizes(dim, sizes=sizes, index=index)


def global_expert_keys(state: Mapping[str, _T], expert_ids: Sequence[int]) -> dict[str, _T]:
    """Rename `...experts.N...`, N counting a rank's own experts, to the global expert ids.

    Args:
        expert_ids: the global id of each expert that this rank holds, in its own order.

    Raises:
        CheckpointValueError: a key counts an expert that `expert_ids` does not have.
    """
    renamed = {}
    for key, value in state.items():
        match = re.search(r"(?:\A|\.)experts\.(\d+)(?=\.|\Z)", key)
        if match is not None:
            number = int(match[1])
            if number >= len(expert_ids):
                raise CheckpointValueError(f"{key!r}: this rank has expert_ids {list(expert_ids)}")
            key = f"{key[: match.start(1)]}{expert_ids[number]}{key[match.end(1) :]}"
        renamed[key] = value
    return renamed


def expert_shards(key_format: str, fused: torch.Tensor, expert_ids: Sequence[int]) -> list[Shard]:
    """Return one whole stored tensor per expert of a fused local tensor, by global expert id.

    Args:
        key_format: the stored key with `{expert}`, such as `mlp.experts.{expert}.up_proj.weight`.
        fused: this rank's experts, stacked along dim 0.

    Raises:
        CheckpointValueError: as many ids as experts are needed.
    """
    check_type("key_format", key_format, str)
    check_type("fused", fused, torch.Tensor)
    if len(expert_ids) != fused.shape[0]:
        raise CheckpointValueError(f"{fused.shape[0]} experts, expert_ids {list(expert_ids)}")
    return [
        Shard(
            key=key_format.format(expert=number),
            tensor=fused[local],
            box=Box.whole(fused.shape[1:]),
        )
        for local, number in enumerate(expert_ids)
    ]
