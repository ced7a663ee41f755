"""Load: fill boxes of stored tensors in place, under any layout, reading only the bytes needed.

Plain CPU memory is read into directly; other destinations (strided views, devices, other dtypes) go
through one small buffer. Each rank loads what it wants; only with `LoadOptions.group` is a load
collective.

    load({"model": model, "optimizer": optimizer, "epoch": 0}, checkpoint_id="run/checkpoint-10")
"""

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from unified_ckpt.errors import CheckpointTypeError, CheckpointValueError, LoadError, check_type
from unified_ckpt.files.storage import Location, shown
from unified_ckpt.geometry import Shard
from unified_ckpt.geometry.tensors import collector_paused
from unified_ckpt.loading.destinations import check_destinations
from unified_ckpt.loading.hooks import StoredHooks
from unified_ckpt.loading.jobs import LoadJob, Twins, make_jobs
from unified_ckpt.loading.matching import (
    PartUse,
    check_all_matched,
    find_unmatched,
    lost,
    parts_used,
    unused_tensors,
)
from unified_ckpt.loading.reader import Reader
from unified_ckpt.loading.sources import Sources
from unified_ckpt.loading.together import read_together
from unified_ckpt.options import MASTER_WEIGHTS, LoadOptions
from unified_ckpt.plans.checkpoint import Checkpoint, read_checkpoint
from unified_ckpt.saving.commit import Agreement
from unified_ckpt.state import FlatState, StateDict, flatten_state

_COMPARED_BYTES = 64 * 1024 * 1024  # of what is stored twice, at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What a load did.

    `num_tensors` boxes were filled; `num_bytes` were read; `verified_bytes` of them were compared
    with checksums: those pieces that were read whole (see `verify_checkpoint` for all of them).
    `missing` keys and paths were left untouched. `unused` are keys of stored tensors of the parts
    in the state dict that no rank of `LoadOptions.group` takes and that are not ignored, as torch's
    unexpected keys; no error, since a state dict may be a part of what was saved. Empty for one of
    several ranks that reads alone, since others may take them, and for a list of shards.
    """

    num_tensors: int
    num_bytes: int
    verified_bytes: int
    missing: tuple[str, ...]
    unused: tuple[str, ...]


@collector_paused()
def load(
    state_dict: StateDict | Sequence[Shard],
    *,
    checkpoint_id: Path | str | Location,
    part: str = "model",
    strict: bool = True,
    verify: bool | Literal["touched"] = True,
    cast: bool = False,
    options: LoadOptions | None = None,
) -> LoadReport:
    """Fill a state in place from a checkpoint that was saved under any layout.

    Not collective, but with `LoadOptions.group`, which makes all ranks of it read the same one. A
    checkpoint that is replaced meanwhile is read anew, so that none is ever mixed from two.

    Args:
        state_dict: what to fill, in the form that `save` takes: tensors are changed in place, also
            leaves that require grad; Python values are replaced; objects with `load_state_dict` get
            their state; an optimizer that has no states yet gets those that are stored. Or shards
            of one part.
        checkpoint_id: a checkpoint directory, or a plain transformers directory of safetensors; or
            a checkpoint in a store: its URL (`s3://bucket/run/checkpoint-10`) or `Location`.
        part: the part that a sequence of shards is read from.
        strict: raise if a key is missing; otherwise leave its tensor or value and report it. If
            none of the parts is stored, that raises all the same.
        verify: compare the pieces (of at most 1 MiB, or a box of a tensor that several ranks
            wrote) that are read whole with their checksums; costs no extra reads. With `touched`
            also those that are read in part, which are then read once more, whole.
        cast: convert where the stored dtype differs from the destination's.
        options: what to take where the checkpoint lacks a tensor, and what to leave alone.

    Raises:
        LoadError: a key is missing, or has another shape or dtype; or what shares a group or memory
            was saved with other hyperparameters or values. Nothing was changed.
        CorruptCheckpointError: bytes are missing, cannot be read or differ from their checksum.
            Destinations may be partly filled.
        ReplacedCheckpointError: it was replaced again and again. Destinations may be partly filled.
        CheckpointTypeError: the state dict cannot be filled.
        CheckpointValueError: a tensor does not fit its box, or shares memory; another `verify`.
    """
    options = options or LoadOptions()

    def fill(checkpoint: Checkpoint) -> tuple[LoadReport, dict[str, PartUse]]:
        return fill_state(
            state_dict,
            checkpoint=checkpoint,
            part=part,
            strict=strict,
            verify=verify,
            cast=cast,
            options=options,
        )

    if options.group is None:
        report, used = read_checkpoint(checkpoint_id, fill)
        return replace(report, unused=unused_tensors(used, None))
    subject = f"load({shown(checkpoint_id)!r})"
    agreement = Agreement(options.group, timeout_s=options.timeout_s, subject=subject)
    report, used = read_together(agreement, checkpoint_id, fill)
    return replace(report, unused=unused_tensors(used, agreement))


def fill_state(
    state_dict: StateDict | Sequence[Shard],
    *,
    checkpoint: Checkpoint,
    part: str = "model",
    strict: bool = True,
    verify: bool | Literal["touched"] = True,
    cast: bool = False,
    options: LoadOptions,
) -> tuple[LoadReport, dict[str, PartUse]]:
    """As `load`, from a checkpoint that is open, and what is used of it; not collective."""
    if verify not in (True, False, "touched"):
        raise CheckpointValueError(f"verify={verify!r}; expected True, False or 'touched'")
    sources = Sources(checkpoint, options)
    hooks = StoredHooks(sources, options)
    with ExitStack() as on_error:
        on_error.callback(hooks.undo)
        flat = _flatten(state_dict, part, hooks, options)
        check_destinations(flat.parts)
        twins: list[Twins] = []
        jobs, missing = make_jobs(flat.parts, sources, cast=cast, strict=strict, twins=twins)
        missing += [*flat.lost, *hooks.lost_masters]
        lost_values = [path for path in flat.values if not sources.values.holds(path)]
        lost_values += _take_unsaid(flat, hooks, checkpoint, strict=strict)
        unmatched = find_unmatched(flat, sources, hooks.is_ignored)
        if strict:
            check_all_matched(unmatched, checkpoint.folder)
            _check_nothing_missing(checkpoint, missing, lost_values)
        _check_equal(checkpoint, twins, sources, cast=cast)
        reader = _read(checkpoint, jobs, verify=verify)
        on_error.pop_all()
    _put_values(flat, sources)
    hooks.finish()
    report = LoadReport(
        num_tensors=sum(job.num_tensors for job in jobs),
        num_bytes=reader.num_bytes,
        verified_bytes=reader.verified_bytes,
        missing=(*dict.fromkeys(key for _, key in missing), *lost(unmatched), *lost_values),
        unused=(),
    )
    asks_for_parts = isinstance(state_dict, Mapping)  # a list of shards names what it wants
    return report, parts_used(flat, sources, hooks.is_ignored) if asks_for_parts else {}


def _read(
    checkpoint: Checkpoint, jobs: Sequence[LoadJob], *, verify: bool | Literal["touched"]
) -> Reader:
    """Run all jobs; return the reader for what it counted."""
    with (
        torch.no_grad(),
        Reader(checkpoint, verify=bool(verify), touched=verify == "touched") as reader,
    ):
        for job in jobs:
            reader.run(job.plan, job.destinations)
            job.finish()
    _mark_changed(jobs)
    return reader


def _check_equal(
    checkpoint: Checkpoint, twins: Sequence[Twins], sources: Sources, *, cast: bool
) -> None:
    """Refuse to fill the same memory with stored tensors that differ."""
    for batch in _in_batches(twins):
        copies = [
            (part, Shard(key=shard.key, tensor=torch.empty_like(shard.tensor), box=shard.box))
            for both in batch
            for part, shard in both
        ]
        parts: dict[str, list[Shard]] = {}
        for part, copy in copies:
            parts.setdefault(part, []).append(copy)
        _read(checkpoint, make_jobs(parts, sources, cast=cast)[0], verify=True)
        for (_, one), (_, other) in zip(copies[::2], copies[1::2], strict=True):
            if not torch.equal(_bytes_of(one), _bytes_of(other)):
                raise LoadError(
                    f"{checkpoint.folder}: {one.key!r} and {other.key!r} are the same memory here, "
                    "but other values are stored of each; give each its own, or add the one that "
                    "is not wanted to ignored_keys"
                )


def _in_batches(twins: Sequence[Twins]) -> Iterator[list[Twins]]:
    batch: list[Twins] = []
    num_bytes = 0
    for both in twins:
        batch.append(both)
        num_bytes += both[0][1].tensor.nbytes
        if num_bytes >= _COMPARED_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def _bytes_of(shard: Shard) -> torch.Tensor:
    return shard.tensor.detach().reshape(-1).view(torch.uint8)


def _flatten(
    state_dict: StateDict | Sequence[Shard], part: str, hooks: StoredHooks, options: LoadOptions
) -> FlatState:
    if not isinstance(state_dict, Mapping):
        for want in state_dict:
            check_type("an item of state_dict", want, Shard)
        state_dict = {part: list(state_dict)}
    else:
        check_type("state_dict, which load must change,", state_dict, MutableMapping)
    flat = flatten_state(
        state_dict, layout=options.layout, ignored_keys=options.ignored_keys, hooks=hooks
    )
    remade = [(path, slot) for path, slot, _ in flat.remade]
    for path, slot in [*flat.all_values(), *remade]:
        if not isinstance(slot.container, MutableMapping | list):
            raise CheckpointTypeError(
                f"{path}: stands in a {type(slot.container).__name__}, which load cannot change; "
                "use a dict or a list, or add it to ignored_keys"
            )
    return flat


def _check_nothing_missing(
    checkpoint: Checkpoint, missing: Sequence[tuple[str, str]], lost_values: Sequence[str]
) -> None:
    for part in dict.fromkeys(part for part, _ in missing):
        keys = list(dict.fromkeys(key for of, key in missing if of == part))
        made = "" if part != MASTER_WEIGHTS else "or master_weight_compatible=True of LoadOptions, "
        raise LoadError(
            f"{checkpoint.folder}: part {part!r} lacks {_first(keys)}; "
            f"check the key names, {made}or pass strict=False to leave such tensors as they are"
        )
    if lost_values:
        raise LoadError(
            f"{checkpoint.folder}: no value was saved for {_first(lost_values)}; check the paths, "
            "or pass strict=False to leave such values as they are"
        )


def _take_unsaid(
    flat: FlatState, hooks: StoredHooks, checkpoint: Checkpoint, *, strict: bool
) -> list[str]:
    """Leave values alone that were saved as dicts with collections of tensors; return the paths.

    An empty dict, or None, gets all values that stand under its name. Those of a list with tensors
    are only half of it: without the tensors they would make a dict of something else.
    """
    structures, unsaid = hooks.structures_inside(), []
    for path in [path for path, _ in flat.all_values() if path in structures]:
        inside = [name for name in structures[path] if not hooks.is_ignored(name)]
        if inside and strict:
            raise LoadError(
                f"{checkpoint.folder}: {path!r} was saved with {_first(inside)}, which has "
                "tensors; what is given does not say that they are wanted. Give a dict with these "
                "keys, and None for what is to be made; an object with load_state_dict; or "
                "strict=False to leave it as it is"
            )
        if inside:
            flat.empty.pop(path, None)
            flat.values.pop(path, None)
            unsaid += inside
    return unsaid


def _first(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:5]))
    return f"{shown} and {len(names) - 5} more" if len(names) > 5 else shown


def _mark_changed(jobs: Sequence[LoadJob]) -> None:
    """Let autograd know, so that it refuses to use values that were saved for a backward."""
    changed = [t for job in jobs for t in job.changed if not t.is_inference()]
    torch.autograd.graph.increment_version(changed)  # one call: there may be many small ones


def _put_values(flat: FlatState, sources: Sources) -> None:
    for path, slot in flat.all_values():
        found, value = sources.values.get(path, slot.get())
        if found:
            slot.put(value)
    flat.rebuild()
    for owner, holder in flat.stateful:
        owner.load_state_dict(holder[0])
