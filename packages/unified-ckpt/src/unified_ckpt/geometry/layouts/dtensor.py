"""What this rank holds of a DTensor, as shards: its placements alone say it, nothing is gathered.

Every dim is a list of runs of global indices. A `Shard` placement keeps one chunk of them; a
`_StridedShard` (FSDP over tensor parallel) cuts them into `split_factor` parts and keeps one chunk
of each, so that a rank may hold several runs, hence several boxes.

    dtensor_shards("wq.weight", distributed)
"""

import itertools
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeGuard, cast

import torch

from unified_ckpt.errors import CheckpointTypeError, CheckpointValueError
from unified_ckpt.geometry import Shape, Shard, chunk_range
from unified_ckpt.geometry.tensors import is_wrapper, narrow_box

if TYPE_CHECKING:  # importing it takes longer than many a save
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor import Shard as TorchShard

Runs = list[tuple[int, int]]  # (begin, length) in the global dim, one after the other in the local


def is_dtensor(value: object) -> "TypeGuard[DTensor]":
    """Whether a value is a DTensor; there is none before its module was imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def dtensor_shards(key: str, tensor: "DTensor") -> list[Shard]:
    """Return this rank's boxes of a DTensor as views of its local tensor; none off its mesh.

    A local tensor that is made of others (weights that are cast to float8, quantized ones) is those
    others, `KEY.NAME` each, which must be shaped as it is: else nothing says which part they are.
    """
    place = tensor.device_mesh.get_coordinate()
    if place is None:
        return []
    local = tensor.to_local().detach()
    if not is_wrapper(local):
        return _local_shards(key, tensor, place, local)
    return [
        shard
        for name, inner in _inner_tensors(key, local)
        for shard in _local_shards(name, tensor, place, inner)
    ]


def _inner_tensors(key: str, local: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Return what a tensor is made of, by key, down to plain tensors."""
    waited = getattr(local, "wait", None)
    if waited is not None:  # AsyncCollectiveTensor: a plain tensor that is not there yet
        return [(key, waited())]
    found: list[tuple[str, torch.Tensor]] = []
    for name in local.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
        inner, place = getattr(local, name), f"{key}.{name}"
        if inner.shape != local.shape:
            raise CheckpointTypeError(
                f"{key!r}: a DTensor whose local tensor is a {type(local).__name__} of shape "
                f"{tuple(local.shape)}, which has {name!r} of shape {tuple(inner.shape)}; which "
                "part of a stored tensor that is, nothing says. Convert it to a plain tensor, or "
                "keep such parameters whole on each rank"
            )
        found += _inner_tensors(place, inner) if is_wrapper(inner) else [(place, inner)]
    return found


def _local_shards(
    key: str, tensor: "DTensor", place: Sequence[int], local: torch.Tensor
) -> list[Shard]:
    runs_of_dim: list[Runs] = [[(0, n)] for n in tensor.shape]
    for axis, placement in enumerate(tensor.placements):
        if placement.is_partial():
            raise CheckpointValueError(
                f"{key!r}: DTensor with placements {tensor.placements}: Partial values are not yet "
                "summed; call redistribute() before saving or loading"
            )
        if placement.is_replicate():
            continue
        dim = cast("TorchShard", placement).dim
        runs_of_dim[dim] = _kept(
            runs_of_dim[dim],
            parts=int(getattr(placement, "split_factor", 1)),  # only _StridedShard has one
            num=tensor.device_mesh.size(axis),
            index=place[axis],
        )
    held = tuple(sum(n for _, n in runs) for runs in runs_of_dim)
    if held != tuple(local.shape):
        raise CheckpointValueError(
            f"{key!r}: local tensor has shape {tuple(local.shape)}, but placements "
            f"{tensor.placements} of {tuple(tensor.shape)} give this rank {held}"
        )
    return [
        Shard.of(key, view, global_shape=tensor.shape, offset=offset)
        for offset, view in _boxes(runs_of_dim, local)
    ]


def _kept(runs: Runs, *, parts: int, num: int, index: int) -> Runs:
    """Cut runs into `parts` chunks and keep chunk `index` of `num` of each."""
    total = sum(n for _, n in runs)
    kept: Runs = []
    for part in range(parts):
        part_begin, part_length = chunk_range(total, num=parts, index=part)
        begin, length = chunk_range(part_length, num=num, index=index)
        for run in _slice(runs, part_begin + begin, length):
            if kept and sum(kept[-1]) == run[0]:
                kept[-1] = (kept[-1][0], kept[-1][1] + run[1])
            else:
                kept.append(run)
    return kept


def _slice(runs: Runs, begin: int, length: int) -> Runs:
    taken, position = [], 0
    for start, n in runs:
        low, high = max(begin, position), min(begin + length, position + n)
        if low < high:
            taken.append((start + low - position, high - low))
        position += n
    return taken


def _boxes(runs_of_dim: list[Runs], local: torch.Tensor) -> list[tuple[Shape, torch.Tensor]]:
    """Return (global offset, view of `local`) of every combination of runs."""
    placed = []
    for runs in runs_of_dim:
        starts = itertools.accumulate((n for _, n in runs), initial=0)
        placed.append([(g, at, n) for (g, n), at in zip(runs, starts, strict=False)] or [(0, 0, 0)])
    boxes = []
    for combination in itertools.product(*placed):
        inside = tuple(at for _, at, _ in combination)
        shape = tuple(n for _, _, n in combination)
        boxes.append((tuple(g for g, _, _ in combination), narrow_box(local, inside, shape)))
    return boxes
