"""A batch in microbatches, cut as `torch.distributed.pipelining` cuts it.

batch = split_batch((tokens,), {"mask": mask}, labels, 4, (None, None))
batch.args[0]                                   # (tokens[:rows],)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.pipelining.microbatch import TensorChunkSpec, split_args_kwargs_into_chunks

from moe_pipeline.errors import MoETypeError, MoEValueError

# The names under which torch's `step` takes a batch that is split already.
PRE_SPLIT = ("arg_mbs", "kwarg_mbs", "target_mbs")
_ENTRY = {"arg_mbs": (tuple, " of tuples"), "kwarg_mbs": (dict, " of dicts"), "target_mbs": None}
ChunkSpecs = tuple[tuple[TensorChunkSpec, ...] | None, dict[str, TensorChunkSpec] | None]


@dataclass(frozen=True, slots=True)
class Batch:
    """One entry for each microbatch; no targets: None."""

    args: Sequence[tuple[Any, ...]]
    kwargs: Sequence[Mapping[str, Any]]
    targets: Sequence[Any] | None


def split_batch(
    args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, count: int, specs: ChunkSpecs
) -> Batch:
    """Cut a batch into `count` microbatches, tensors along dim 0 unless the specs say otherwise."""
    all_args: Sequence[tuple[Any, ...]] = [()] * count
    all_kwargs: Sequence[Mapping[str, Any]] = [{}] * count
    if args or kwargs:
        all_args, all_kwargs = split_args_kwargs_into_chunks(args, kwargs, count, *specs)
        _check_count("the batch", len(all_args), count)
    targets = None
    if target is not None:
        pieces, _ = split_args_kwargs_into_chunks((target,), None, count)
        _check_count("target", len(pieces), count)
        targets = [piece for (piece,) in pieces]
    return Batch(all_args, all_kwargs, targets)


def pre_split_batch(given: Mapping[str, Any], count: int, has_whole: object) -> Batch:
    """Take a batch that is split already, by the names of `PRE_SPLIT`."""
    if has_whole:
        raise MoEValueError(
            "a batch is given both whole and in microbatches; give args, kwargs and target, or "
            "arg_mbs, kwarg_mbs and target_mbs"
        )
    for name, values in given.items():
        if values is None:
            continue
        kind, words = _ENTRY[name] or (object, "")
        if not isinstance(values, list) or not all(isinstance(v, kind) for v in values):
            raise MoETypeError(f"{name} must be a list{words}, got {values!r:.200}")
        if len(values) != count:
            raise MoEValueError(f"{name} has {len(values)} entries for {count} microbatches")
    return Batch(
        given["arg_mbs"] or [()] * count, given["kwarg_mbs"] or [{}] * count, given["target_mbs"]
    )


def _check_count(what: str, found: int, count: int) -> None:
    if found != count:
        raise MoEValueError(
            f"{what} has {found} rows, which do not fill {count} microbatches; give at least one "
            "row for each, or microbatches with arg_mbs=, kwarg_mbs= and target_mbs="
        )
