"""The reads of one load: every want with its source, compressed moments with their scales.

A want whose stored form is codes is read into memory of its own, with the scales of the boxes that
it touches, and decoded when both are there; all others are read straight into place.

    jobs, missing = make_jobs({"model": shards}, sources, cast=False)
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import torch

from unified_ckpt.errors import LoadError
from unified_ckpt.geometry import Box, BoxMeta, Shape, Shard, overlap
from unified_ckpt.geometry.tensors import dtype_of, narrow_box
from unified_ckpt.loading.destinations import memory_of
from unified_ckpt.loading.part_index import PartIndex, StoredScale
from unified_ckpt.loading.reader import Destination
from unified_ckpt.loading.sources import Source, Sources
from unified_ckpt.plans import LoadPlan, SplitTensor, StoredTensor, plan_load
from unified_ckpt.state.compression import BLOCK, dequantize, moment_of

Twins = tuple[tuple[str, Shard], tuple[str, Shard]]  # two wants with their parts
Index = Mapping[str, StoredTensor | SplitTensor]


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Reads of one stored part: run the plan into the destinations, then `finish`."""

    cast: bool
    metas: list[BoxMeta] = field(default_factory=list)
    destinations: list[Destination | None] = field(default_factory=list)
    changed: list[torch.Tensor] = field(default_factory=list)
    decoders: list[Callable[[], None]] = field(default_factory=list)
    plan: LoadPlan = field(default_factory=lambda: LoadPlan(reads=(), missing=()))

    @property
    def num_tensors(self) -> int:
        """Number of wanted boxes."""
        return len(self.changed)

    def add(self, meta: BoxMeta, tensor: torch.Tensor, stored: StoredTensor | SplitTensor) -> None:
        """Read a box into a tensor."""
        self.metas.append(meta)
        memory = tensor.detach() if tensor.requires_grad else tensor
        self.destinations.append(Destination(meta.key, memory, _torch_dtype(stored.dtype)))

    def finish(self) -> None:
        """Decode what was read as codes."""
        for decode in self.decoders:
            decode()


def make_jobs(
    parts: Mapping[str, Sequence[Shard]],
    sources: Sources,
    *,
    cast: bool,
    strict: bool = True,
    twins: list[Twins] | None = None,
) -> tuple[list[LoadJob], list[tuple[str, str]]]:
    """Plan all reads of a load; return the jobs and the (part, key) pairs that are not stored.

    `twins` gets wants of the same memory that are stored twice; only the first of them is read.
    """
    groups: dict[tuple[str, bool], list[tuple[str, Shard]]] = {}
    missing: list[tuple[str, str]] = []
    seen: dict[int, list[tuple[Source, str, Shard]]] = {}
    wanted = [part for part, shards in parts.items() if shards]
    lost = [part for part in wanted if not sources.has_source(part)]
    if lost and (strict or lost == wanted):
        sources.index(lost[0])  # raises
    for part, shards in parts.items():
        for shard in shards:
            source = sources.find(part, shard.key)
            if source is None:
                missing.append((part, shard.key))
                continue
            first = _first_of(seen, source, part, shard)
            if first is None:
                group = groups.setdefault((source.part, source.cast or cast), [])
                group.append((source.key, shard))
            elif first[0][:2] != source[:2] or first[2].box.offset != shard.box.offset:
                sources.taken.setdefault(source.part, set()).add(source.key)
                if twins is not None:
                    twins.append(((first[1], first[2]), (part, shard)))
    for (part, _), wants in groups.items():
        sources.taken.setdefault(part, set()).update(key for key, _ in wants)
    jobs = [
        _make_job(sources.index(part), wants, cast=group_cast)
        for (part, group_cast), wants in groups.items()
    ]
    return jobs, missing


def _first_of(
    seen: dict[int, list[tuple[Source, str, Shard]]], source: Source, part: str, shard: Shard
) -> tuple[Source, str, Shard] | None:
    """Return the first want of the same memory (tied weights), None if this one is it."""
    tensor = shard.tensor
    if not tensor.numel():  # they all have the same address
        return None
    others = seen.setdefault(tensor.data_ptr(), [])
    if others:
        memory = memory_of(tensor)
        for other in others:
            if memory_of(other[2].tensor) == memory:
                return other
    others.append((source, part, shard))
    return None


def _make_job(index: PartIndex, wants: Sequence[tuple[str, Shard]], *, cast: bool) -> LoadJob:
    stored = index.resolve(dict.fromkeys(key for key, _ in wants))
    job = LoadJob(cast)
    scaled: dict[str, StoredTensor | SplitTensor] = {}
    for key, shard in wants:
        meta = shard.meta if shard.key == key else replace(shard.meta, key=key)
        if index.scales(key) and meta.dtype != stored[key].dtype:
            scaled |= _add_compressed(job, index, shard, meta, stored[key])
        else:
            job.add(meta, shard.tensor, stored[key])
        job.changed.append(shard.tensor)
    return replace(job, plan=plan_load(job.metas, {**stored, **scaled}, cast=cast))


def _add_compressed(
    job: LoadJob, index: PartIndex, shard: Shard, meta: BoxMeta, stored: StoredTensor | SplitTensor
) -> Index:
    """Add reads of codes and of the scales that they need; return where the scales are stored."""
    codes = torch.empty(meta.box.local_shape, dtype=_torch_dtype(stored.dtype))
    job.add(replace(meta, dtype=stored.dtype), codes, stored)
    pieces: list[tuple[StoredScale, torch.Tensor, tuple[Shape, Shape]]] = []
    for scale in index.scales(meta.key):
        shared = overlap((meta.box.offset, meta.box.local_shape), (scale.offset, scale.shape))
        if shared is not None and meta.box.numel:
            num_blocks = -(-math.prod(scale.shape) // BLOCK)
            pieces.append((scale, torch.empty(num_blocks), shared))
    found = index.resolve([scale.key for scale, _, _ in pieces])
    for scale, scales, _ in pieces:
        scale_meta = BoxMeta(scale.key, "F32", Box.whole(scales.shape))
        job.add(scale_meta, scales, found[scale.key])

    def decode() -> None:
        for scale, scales, (offset, shape) in pieces:
            here = tuple(o - m for o, m in zip(offset, meta.box.offset, strict=True))
            in_box = tuple(o - s for o, s in zip(offset, scale.offset, strict=True))
            moment = moment_of(meta.key)
            if moment is None:
                raise LoadError(f"{meta.key!r} has scales, but is no moment")
            values = dequantize(
                narrow_box(codes, here, shape), scales, moment, offset=in_box, box_shape=scale.shape
            )
            narrow_box(shard.tensor.detach(), here, shape).copy_(values)

    job.decoders.append(decode)
    return found


@cache
def _torch_dtype(name: str) -> torch.dtype:
    torch_dtype = dtype_of(name).torch_dtype
    if torch_dtype is None:
        raise LoadError(f"torch has no dtype for {name}")
    return torch_dtype
