"""Save: what every rank holds becomes one directory, complete or absent, whatever is killed when.

The phases, each ended by an agreement of all ranks: describe (who holds what), prepare (space and a
hidden directory), write (each rank its bytes, checksummed, fsynced), commit (manifest, one rename).

    save({"model": [Shard(key="w", tensor=w, global_shape=(4,), offset=(0,))]},
         checkpoint_id="run/checkpoint-10")
"""

import errno
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist

from unified_ckpt.files import free_bytes, sync_tree
from unified_ckpt.files.format.tables import (
    decode_records,
    encode_records,
    join_records,
    packed_size,
)
from unified_ckpt.files.storage import Location, shown
from unified_ckpt.geometry import Shard
from unified_ckpt.geometry.tensors import collector_paused
from unified_ckpt.options import SaveOptions
from unified_ckpt.plans import SavePlan
from unified_ckpt.saving.commit import (
    Agreement,
    Draft,
    Staging,
    clean_leftovers,
    write_blobs,
    write_share,
)
from unified_ckpt.saving.described import PLANS, Described
from unified_ckpt.saving.request import STATE_NAME, Request, make_request
from unified_ckpt.state import StateDict

_TABLE_BYTES_PER_TENSOR = 512  # in header, index and manifest: estimates for the space check
_BYTES_PER_TABLE_BYTE = 32 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """What a save did: `num_bytes` of the whole checkpoint, `rank_bytes` of this rank's tensors."""

    path: Path | Location
    num_files: int
    num_bytes: int
    rank_bytes: int
    replaced: bool
    removed_leftovers: tuple[Path, ...]


@collector_paused()
def save(
    state_dict: StateDict,
    *,
    checkpoint_id: Path | str | Location,
    group: dist.ProcessGroup | None = None,
    files: Mapping[str, bytes] | None = None,
    rank_files: Mapping[str, bytes] | None = None,
    options: SaveOptions | None = None,
    timeout_s: float = 1800.0,
) -> SaveReport:
    """Write a checkpoint directory; collective over `group`, every rank of it must call.

    Every distinct box is written once. An existing checkpoint of that name is replaced in one step
    after the new one is durable. If the call raises in a phase before 'commit' (messages name it),
    the name shows what it showed before; in 'commit', the old or the new checkpoint, complete.

    Args:
        state_dict: nested; the keys at the top are parts, for example `model`, `optimizer`,
            `master_weights`; ranks may hold different parts, or nothing. Leaves are DTensors, plain
            tensors (whole, or with a box of `options.layout`), `Shard`s, and Python values, which
            become JSON and must be equal on the ranks that have them. Objects with `state_dict`
            (modules, schedulers) and optimizers of named parameters are taken as such, and a
            sequence of `Shard`s as a part. Part `model` gets transformers' file names.
        checkpoint_id: the directory, on a file system that all ranks share; or a URL of an object
            store (`s3://bucket/run/checkpoint-10`), or a `Location` in any store. The same on every
            rank. In a store no object has two writers, so what several ranks hold of one tensor is
            stored in boxes (see `SaveOptions.ignore_merge_optimizer`).
        group: the ranks that save together, None for all; without process groups this one alone.
        files: more files by relative name, written by the group's first rank (others' are ignored).
        rank_files: more files by relative name, written by every rank; names must be unique.
        options: what to exclude, keep sharded or compress; the same on every rank.
        timeout_s: bound on each wait for the other ranks.

    Raises:
        SaveArgumentError: (a ValueError) the arguments of some rank, or of all together, are wrong.
        SavePeerError: a rank did not arrive in time, or its connection was lost.
        SaveError: some rank failed, for example because the disk is full. On every rank.
    """
    agreement = Agreement(group, timeout_s=timeout_s, subject=f"save({shown(checkpoint_id)!r})")
    with agreement.phase("describe", checks_arguments=True) as phase:
        request = make_request(
            state_dict,
            checkpoint_id=checkpoint_id,
            options=options,
            files=files if agreement.rank == 0 else None,
            rank_files=rank_files,
        )
        description = request.describe()
        phase.payload = description.summary(PLANS.digests())
    return _save(agreement, request, Described.exchange(agreement, description, phase.results))


@collector_paused()
def save_request(
    make: Callable[[], Request],
    *,
    group: dist.ProcessGroup | None = None,
    admit: Callable[[int], None] | None = None,
    subject: str = "save in the background",
    timeout_s: float,
) -> SaveReport:
    """As `save`, of a request that was taken apart before; collective over `group`.

    Args:
        make: returns this rank's request; what it raises, all ranks raise.
        group: the ranks, None for all.
        admit: called on every rank with the bytes that the checkpoint needs, before anything is
            written; what it raises, all ranks raise.
        subject: names the call in messages.
        timeout_s: bound on each wait for the other ranks.
    """
    agreement = Agreement(group, timeout_s=timeout_s, subject=subject)
    with agreement.phase("describe", checks_arguments=True) as phase:
        request = make()
        if agreement.rank != 0:
            request = replace(request, files={})
        description = request.describe()
        phase.payload = description.summary(PLANS.digests())
    described = Described.exchange(agreement, description, phase.results)
    return _save(agreement, request, described, admit=admit)


def _save(
    agreement: Agreement,
    request: Request,
    described: Described,
    *,
    admit: Callable[[int], None] | None = None,
) -> SaveReport:
    first = agreement.rank == 0
    target = request.target
    staging: Staging | Draft | None = None
    try:
        with agreement.phase("prepare", checks_arguments=True) as phase:
            planned = described.plan()
            plan, state_file = planned.plan, described.state_file(planned)
            described.check_names(planned, state_file)
            needed = _needed_bytes(plan, described.blob_bytes(state_file))
            if admit is not None:
                admit(needed)
            if first:
                removed: list[Path] = []
                if isinstance(target, Location):
                    staging = Draft.make(target)
                else:
                    removed = clean_leftovers(target.parent)
                    _check_space(target, needed)
                    staging = Staging.make(target)
                phase.payload = [staging.folder.name, [str(path) for path in removed]]
        name, removed_names = phase.results[0]
        with agreement.phase("write") as phase:
            blobs = {**request.files, **request.rank_files}
            if first:
                blobs |= plan.indexes
                if state_file:
                    blobs[STATE_NAME] = state_file
            place = target / name if isinstance(target, Location) else target.with_name(name)
            records = write_rank(plan, request.parts, blobs, rank=agreement.rank, folder=place)
        written = agreement.gather_bytes("records", encode_records(records), keep=first)
        with agreement.phase("commit") as phase:
            if staging is not None:
                phase.payload = publish_written(staging, plan, written, {})
        num_files, replaced, num_bytes = phase.results[0]
    finally:
        if staging is not None:
            staging.close()
    return SaveReport(
        path=target,
        num_files=num_files,
        num_bytes=num_bytes,
        rank_bytes=plan.rank_bytes[agreement.rank],
        replaced=replaced,
        removed_leftovers=tuple(Path(name) for name in removed_names),
    )


def _needed_bytes(plan: SavePlan, blob_bytes: int) -> int:
    """Return the bytes of all files, those of tables estimated."""
    needed = blob_bytes
    for num_bytes, num_tensors in zip(plan.tensor_bytes, plan.num_tensors, strict=True):
        needed += num_bytes + num_bytes // _BYTES_PER_TABLE_BYTE
        needed += _TABLE_BYTES_PER_TENSOR * (1 + num_tensors)
    return needed


def _check_space(target: Path, needed: int) -> None:
    folder = next(path for path in target.parents if path.exists())
    free = free_bytes(folder)
    if needed > free:
        raise OSError(
            errno.ENOSPC,
            f"the checkpoint needs {needed} bytes, but {folder} has {free} free, so "
            f"{needed - free} are missing; nothing was written. Free space or choose another "
            "folder",
        )


def write_rank(
    plan: SavePlan,
    parts: Mapping[str, Sequence[Shard]],
    blobs: Mapping[str, bytes],
    *,
    rank: int,
    folder: Path | Location,
) -> dict[str, bytes]:
    """Write one rank's bytes and whole files, durably; return their packed records by name."""
    if isinstance(folder, Path) and not folder.is_dir():
        raise FileNotFoundError(
            f"this rank does not see {folder}; all ranks must share the checkpoint's file system"
        )
    records = write_share(plan, parts, rank=rank, folder=folder)
    records |= write_blobs(blobs, folder)
    if (
        isinstance(folder, Path) and rank != 0
    ):  # rank 0 does the same when it publishes; other machines have names of their own
        sync_tree(folder)
    return records


def publish_written(
    staging: Staging | Draft,
    plan: SavePlan,
    written: Sequence[bytes],
    blobs: Mapping[str, bytes],
) -> tuple[int, bool, int]:
    """Write more whole files and the manifest of what all ranks wrote, then publish.

    Args:
        staging: where all is written.
        plan: of the save.
        written: what `write_rank` returned on every rank, by `encode_records`.
        blobs: more whole files by name.

    Returns:
        The number of files, whether a checkpoint was replaced, and the bytes of all files.
    """
    fragments = [*map(decode_records, written), write_blobs(blobs, staging.folder)]
    records = join_records(fragments)
    num_bytes = sum(map(packed_size, records.values()))
    return len(records) + 1, staging.commit(records, plan.weight_maps), num_bytes
