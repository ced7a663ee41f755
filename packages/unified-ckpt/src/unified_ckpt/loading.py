"""Load: fill boxes of stored tensors in place, under any layout, reading only the bytes needed.

Plain CPU memory is read into directly; other destinations (strided views, devices, other dtypes) go
through one small buffer. Nothing is collective: each rank loads what it wants.

    load([Shard(key="w", tensor=w, global_shape=(4,), offset=(0,))],
         checkpoint_id="run/checkpoint-10")
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from unified_ckpt.checkpoint import Checkpoint
from unified_ckpt.dtypes import dtype_of
from unified_ckpt.errors import LoadError
from unified_ckpt.load_plan import plan_load
from unified_ckpt.reader import Destination, Reader
from unified_ckpt.shard import Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What a load did.

    `num_bytes` were read; `verified_bytes` of them were compared with checksums: those pieces that
    were read whole (see `verify_checkpoint` for all of them). `missing` keys were left untouched.
    """

    num_tensors: int
    num_bytes: int
    verified_bytes: int
    missing: tuple[str, ...]


def load(
    wants: Sequence[Shard],
    *,
    checkpoint_id: Path | str,
    part: str = "model",
    strict: bool = True,
    verify: bool = True,
    cast: bool = False,
) -> LoadReport:
    """Fill every `Shard.tensor` from the stored tensor of its key; not collective.

    Args:
        wants: the boxes to fill, in any layout; the tensors are changed in place, also leaves that
            require grad.
        checkpoint_id: a checkpoint directory, or a plain transformers directory of safetensors.
        part: `model`, or another part that was saved.
        strict: raise if a key is missing; otherwise leave its tensor as it is and report it.
        verify: compare the pieces that are read whole with their checksums; costs no extra reads.
        cast: convert where the stored dtype differs from the destination's.

    Raises:
        LoadError: a key is missing, or has another shape or dtype. Nothing was changed.
        CorruptCheckpointError: bytes are missing or differ from their checksum. Destinations may
            be partly filled.
    """
    checkpoint = Checkpoint(checkpoint_id)
    metas = [want.meta for want in wants]
    for want in wants:
        _check_destination(want)
    index = checkpoint.tensors(part, dict.fromkeys(meta.key for meta in metas)) if metas else {}
    plan = plan_load(metas, index, cast=cast)
    if plan.missing and strict:
        shown = ", ".join(map(repr, plan.missing[:5]))
        more = f" and {len(plan.missing) - 5} more" if len(plan.missing) > 5 else ""
        raise LoadError(
            f"{checkpoint.folder}: part {part!r} lacks {shown}{more}; "
            "check the key names, or pass strict=False to leave such tensors as they are"
        )
    destinations = [
        Destination(want.key, want.tensor.detach(), _torch_dtype(index[want.key].dtype))
        if want.key in index
        else None
        for want in wants
    ]
    with torch.no_grad(), Reader(checkpoint, verify=verify) as reader:
        reader.run(plan, destinations)
    for want in wants:
        if not want.tensor.is_inference():
            torch.autograd.graph.increment_version(want.tensor)
    return LoadReport(
        num_tensors=sum(destination is not None for destination in destinations),
        num_bytes=reader.num_bytes,
        verified_bytes=reader.verified_bytes,
        missing=plan.missing,
    )


def _torch_dtype(name: str) -> torch.dtype:
    torch_dtype = dtype_of(name).torch_dtype
    if torch_dtype is None:
        raise LoadError(f"torch has no dtype for {name}")
    return torch_dtype


def _check_destination(want: Shard) -> None:
    strides = zip(want.tensor.shape, want.tensor.stride(), strict=True)
    if any(size > 1 and stride == 0 for size, stride in strides):
        raise ValueError(
            f"{want.key!r}: the destination {tuple(want.tensor.shape)} with strides "
            f"{want.tensor.stride()} shares memory between elements; pass a tensor that does not"
        )
