"""Load: fill boxes of stored tensors in place, under any layout, reading only the bytes needed.

Plain CPU memory is read into directly; other destinations (strided views, devices, other dtypes) go
through one small buffer. Each rank loads what it wants; only with `LoadOptions.group` is a load
collective.

    load({"model": model, "optimizer": optimizer, "epoch": 0}, checkpoint_id="run/checkpoint-10")
"""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from unified_ckpt.errors import CheckpointTypeError, CheckpointValueError, LoadError, check_type
from unified_ckpt.geometry import Shard
from unified_ckpt.geometry.tensors import collector_paused
from unified_ckpt.loading.jobs import LoadJob, make_jobs
from unified_ckpt.loading.optimizer_memory import StoredStates, allocate_states, remove_states
from unified_ckpt.loading.reader import Reader
from unified_ckpt.loading.sources import Sources
from unified_ckpt.loading.together import read_together
from unified_ckpt.options import MASTER_WEIGHTS, LoadOptions, base_key, matcher
from unified_ckpt.plans.checkpoint import Checkpoint, read_checkpoint
from unified_ckpt.saving.commit import Agreement
from unified_ckpt.state import (
    FlatState,
    StateDict,
    find_value,
    flatten_state,
    place_tensor,
    restore_value,
)
from unified_ckpt.state.optimizer import StoredGroups


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What a load did.

    `num_tensors` boxes were filled; `num_bytes` were read; `verified_bytes` of them were compared
    with checksums: those pieces that were read whole (see `verify_checkpoint` for all of them).
    `missing` keys and paths were left untouched.
    """

    num_tensors: int
    num_bytes: int
    verified_bytes: int
    missing: tuple[str, ...]


@collector_paused()
def load(
    state_dict: StateDict | Sequence[Shard],
    *,
    checkpoint_id: Path | str,
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
        checkpoint_id: a checkpoint directory, or a plain transformers directory of safetensors.
        part: the part that a sequence of shards is read from.
        strict: raise if a key is missing; otherwise leave its tensor or value and report it. If
            none of the parts is stored, that raises all the same.
        verify: compare the pieces (of at most 1 MiB, or a box of a tensor that several ranks
            wrote) that are read whole with their checksums; costs no extra reads. With `touched`
            also those that are read in part, which are then read once more, whole.
        cast: convert where the stored dtype differs from the destination's.
        options: what to take where the checkpoint lacks a tensor, and what to leave alone.

    Raises:
        LoadError: a key is missing, or has another shape or dtype; or parameters of one group were
            saved with different hyperparameters. Nothing was changed.
        CorruptCheckpointError: bytes are missing, cannot be read or differ from their checksum.
            Destinations may be partly filled.
        ReplacedCheckpointError: the checkpoint was replaced, removed or written to again and again.
            Destinations may be partly filled.
        CheckpointTypeError: the state dict cannot be filled.
        CheckpointValueError: a tensor does not fit its box, or shares memory between its elements.
    """
    options = options or LoadOptions()

    def fill(checkpoint: Checkpoint) -> LoadReport:
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
        return read_checkpoint(checkpoint_id, fill)
    subject = f"load({str(checkpoint_id)!r})"
    agreement = Agreement(options.group, timeout_s=options.timeout_s, subject=subject)
    return read_together(agreement, checkpoint_id, fill)


def fill_state(
    state_dict: StateDict | Sequence[Shard],
    *,
    checkpoint: Checkpoint,
    part: str = "model",
    strict: bool = True,
    verify: bool | Literal["touched"] = True,
    cast: bool = False,
    options: LoadOptions,
) -> LoadReport:
    """As `load`, from a checkpoint that is open; not collective."""
    sources = Sources(checkpoint, options)
    hooks = _OptimizerHooks(sources, options)
    with ExitStack() as on_error:
        on_error.callback(hooks.undo)
        flat = _flatten(state_dict, part, hooks, options)
        _check_destinations(flat)
        jobs, missing = make_jobs(flat.parts, sources, cast=cast, strict=strict)
        missing += hooks.lost_masters
        lost_values = [path for path in flat.values if not find_value(sources.values, path)[0]]
        dropped = _dropped_states(flat, sources, hooks.is_ignored)
        if strict:
            _check_nothing_missing(checkpoint, missing, lost_values)
            _check_no_state_dropped(dropped)
        reader = _read(checkpoint, jobs, verify=verify)
        on_error.pop_all()
    _put_values(flat, sources)
    return LoadReport(
        num_tensors=sum(job.num_tensors for job in jobs),
        num_bytes=reader.num_bytes,
        verified_bytes=reader.verified_bytes,
        missing=(*dict.fromkeys(key for _, key in [*missing, *dropped]), *lost_values),
    )


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


class _OptimizerHooks:
    """Gives fresh optimizers memory for stored states, and finds the stored groups of theirs."""

    def __init__(self, sources: Sources, options: LoadOptions) -> None:
        self._sources = sources
        self._layout = options.layout
        self._ignores = bool(options.ignored_keys)
        self.is_ignored = matcher(options.ignored_keys)
        self._groups = StoredGroups(sources.values)
        self._added: list[tuple[torch.optim.Optimizer, list[tuple[torch.Tensor, str]]]] = []
        self.lost_masters: list[tuple[str, str]] = []

    def prepare(self, optimizer: torch.optim.Optimizer, part: str, prefix: str) -> None:
        stored = self._without_ignored(self._sources.states_of(part, prefix), part, prefix)
        added = allocate_states(
            optimizer, stored, part, lambda key, tensor: place_tensor(key, tensor, self._layout)
        )
        self._added.append((optimizer, added.states))
        self.lost_masters += [
            (MASTER_WEIGHTS, key) for key in added.lost_masters if not self.is_ignored(key)
        ]

    def _without_ignored(self, stored: StoredStates, part: str, prefix: str) -> StoredStates:
        """Leave out what will not be read, but the tensors of a parameter with other states."""
        if not self._ignores:
            return stored
        taken = {base_key(key) for key in stored.tensors if not self.is_ignored(f"{prefix}{key}")}
        return replace(
            stored,
            tensors={k: tensor for k, tensor in stored.tensors.items() if base_key(k) in taken},
            values={
                key: value
                for key, value in stored.values.items()
                if not self.is_ignored(f"{part}.{prefix}{key}")
            },
            master_dtype=lambda k: None if self.is_ignored(k) else stored.master_dtype(k),
        )

    def group_number(
        self, where: str, names: Sequence[str], position: int, fields: Sequence[str]
    ) -> int:
        return self._groups.number(where, names, position, fields)

    def undo(self) -> None:
        """Take away what was added, so that a failed load leaves a fresh optimizer fresh."""
        for optimizer, added in self._added:
            remove_states(optimizer, added)


def _flatten(
    state_dict: StateDict | Sequence[Shard], part: str, hooks: _OptimizerHooks, options: LoadOptions
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
    for path, slot in flat.all_values():
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


def _first(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:5]))
    return f"{shown} and {len(names) - 5} more" if len(names) > 5 else shown


def _dropped_states(
    flat: FlatState, sources: Sources, is_ignored: Callable[[str], bool]
) -> list[tuple[str, str]]:
    """Return the (part, parameter) pairs whose states are stored, but have no place to go to."""
    dropped = []
    stored: dict[str, set[str]] = {}
    for part, name in flat.stateless:
        if part not in stored:
            keys = sources.index(part).tensor_keys() if sources.has_part(part) else set()
            stored[part] = {base_key(k) for k in keys if "/" in k and not is_ignored(k)}
        if name in stored[part]:
            dropped.append((part, name))
    return dropped


def _check_no_state_dropped(dropped: Sequence[tuple[str, str]]) -> None:
    for part, name in dropped:
        raise LoadError(
            f"part {part!r} holds states of {name!r}, but the optimizer's state dict has "
            "none to fill; pass the optimizer itself, or get_optimizer_state_dict(...)"
        )


def _check_destinations(flat: FlatState) -> None:
    for shards in flat.parts.values():
        for want in shards:
            tensor = want.tensor
            if 0 in tensor.stride() and any(
                size > 1 and stride == 0
                for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
            ):
                raise CheckpointValueError(
                    f"{want.key!r}: the destination {tuple(tensor.shape)} with strides "
                    f"{tensor.stride()} shares memory between elements; pass a tensor that does not"
                )


def _mark_changed(jobs: Sequence[LoadJob]) -> None:
    """Let autograd know, so that it refuses to use values that were saved for a backward."""
    for job in jobs:
        for tensor in job.changed:
            if not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)


def _put_values(flat: FlatState, sources: Sources) -> None:
    for path, slot in flat.all_values():
        found, value = find_value(sources.values, path)
        if found:
            slot.put(restore_value(value, slot.get()))
    flat.rebuild()
    for owner, holder in flat.stateful:
        owner.load_state_dict(holder[0])
