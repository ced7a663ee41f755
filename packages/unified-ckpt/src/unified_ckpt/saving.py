"""Save: what every rank holds becomes one directory, complete or absent, whatever is killed when.

The phases, each ended by an agreement of all ranks: describe (who holds what), prepare (space and a
hidden directory), write (each rank its bytes, checksummed, fsynced), commit (manifest, one rename).

    save({"model": [Shard(key="w", tensor=w, global_shape=(4,), offset=(0,))]},
         checkpoint_id="run/checkpoint-10")
"""

import errno
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch.distributed as dist

from unified_ckpt.agreement import Agreement
from unified_ckpt.commit import Staging, clean_leftovers
from unified_ckpt.files import free_bytes, sync_tree
from unified_ckpt.manifest import MANIFEST_NAME, FileRecord, Manifest, encode_manifest
from unified_ckpt.save_plan import DEFAULT_MAX_SHARD_BYTES, SavePlan, plan_save
from unified_ckpt.shard import BoxMeta, Shard
from unified_ckpt.writer import file_records, write_blobs, write_share

_MANIFEST_BYTES_PER_PIECE = 128  # an upper estimate for the free-space check
_PART = re.compile(r"[a-z][a-z0-9_]*\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """What a save did: `num_bytes` of the whole checkpoint, `rank_bytes` of this rank's tensors."""

    path: Path
    num_files: int
    num_bytes: int
    rank_bytes: int
    replaced: bool
    removed_leftovers: tuple[Path, ...]


def save(
    parts: Mapping[str, Sequence[Shard]],
    *,
    checkpoint_id: Path | str,
    group: dist.ProcessGroup | None = None,
    files: Mapping[str, bytes] | None = None,
    rank_files: Mapping[str, bytes] | None = None,
    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
    timeout_s: float = 1800.0,
) -> SaveReport:
    """Write a checkpoint directory; collective over `group`, every rank of it must call.

    Every distinct box is written once. An existing checkpoint of that name is replaced in one step
    after the new one is durable. If the call raises in a phase before 'commit' (messages name it),
    the name shows what it showed before; in 'commit', the old or the new checkpoint, complete.

    Args:
        parts: tensors by part, for example `model`, `optimizer`, `master_weights`; ranks may hold
            different parts, or nothing. Part `model` gets transformers' file names.
        checkpoint_id: the directory, on a file system that all ranks share; the same on every rank.
        group: the ranks that save together, None for all; without process groups this one alone.
        files: more files by relative name, written by the group's first rank (others' are ignored).
        rank_files: more files by relative name, written by every rank; names must be unique.
        max_shard_bytes: most bytes of tensors in one file, unless one tensor is larger.
        timeout_s: bound on each wait for the other ranks.

    Raises:
        SaveArgumentError: (a ValueError) the arguments of some rank, or of all together, are wrong.
        SavePeerError: a rank did not arrive in time, or its connection was lost.
        SaveError: some rank failed, for example because the disk is full. On every rank.
    """
    agreement = Agreement(group, timeout_s=timeout_s, subject=f"save({str(checkpoint_id)!r})")
    with agreement.phase("describe", checks_arguments=True) as phase:
        request = _Request(
            target=Path(os.path.realpath(checkpoint_id)),
            max_shard_bytes=int(max_shard_bytes),
            parts=parts,
            files=(files or {}) if agreement.rank == 0 else {},
            rank_files=rank_files or {},
        )
        phase.payload = request.describe()
    return _save(agreement, request, described=phase.results)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """What one rank asks for."""

    target: Path
    max_shard_bytes: int
    parts: Mapping[str, Sequence[Shard]]
    files: Mapping[str, bytes]
    rank_files: Mapping[str, bytes]

    def describe(self) -> dict[str, Any]:
        """Check the request as far as one rank can, and return it without contents."""
        return {
            "target": str(self.target),
            "max_shard_bytes": self.max_shard_bytes,
            "parts": _describe_parts(self.parts),
            "files": _describe_blobs(self.files) + _describe_blobs(self.rank_files),
        }


def _save(
    agreement: Agreement, request: _Request, *, described: Sequence[Mapping[str, Any]]
) -> SaveReport:
    first = agreement.rank == 0
    staging: Staging | None = None
    try:
        with agreement.phase("prepare", checks_arguments=True) as phase:
            plan = _plan(described)
            if first:
                removed = clean_leftovers(request.target.parent)
                _check_space(request.target, plan, described)
                staging = Staging.make(request.target)
                phase.payload = [str(staging.folder), [str(path) for path in removed]]
        folder, removed_names = phase.results[0]
        with agreement.phase("write") as phase:
            blobs = {**request.files, **request.rank_files, **(plan.indexes if first else {})}
            phase.payload = _write(
                plan, request.parts, blobs, rank=agreement.rank, folder=Path(folder)
            )
        written = phase.results
        with agreement.phase("commit") as phase:
            if staging is not None:
                manifest = _manifest(plan, written)
                write_blobs({MANIFEST_NAME: encode_manifest(manifest)}, staging.folder)
                phase.payload = [len(manifest.files) + 1, staging.publish()]
        num_files, replaced = phase.results[0]
    finally:
        if staging is not None:
            staging.close()
    return SaveReport(
        path=request.target,
        num_files=num_files,
        num_bytes=plan.num_bytes + _blob_bytes(described),
        rank_bytes=plan.rank_bytes[agreement.rank],
        replaced=replaced,
        removed_leftovers=tuple(Path(name) for name in removed_names),
    )


def _blob_bytes(described: Sequence[Mapping[str, Any]]) -> int:
    return sum(num_bytes for rank in described for _, num_bytes in rank["files"])


def _describe_parts(parts: Mapping[str, Sequence[Shard]]) -> dict[str, list[list[Any]]]:
    """Check this rank's parts and return their boxes as JSON types."""
    described = {}
    for part, shards in parts.items():
        if not _PART.match(part):
            raise ValueError(f"part {part!r} must be lower-case letters, digits and underscores")
        for shard in shards:
            if not isinstance(shard, Shard):
                raise TypeError(f"part {part!r} holds a {type(shard).__name__}; expected Shard")
        described[part] = [shard.meta.to_json() for shard in shards]
    return described


def _describe_blobs(blobs: Mapping[str, bytes]) -> list[tuple[str, int]]:
    """Check the names and types of this rank's whole files and return their sizes."""
    for name, blob in blobs.items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or str(path) != name or name == ".":
            raise ValueError(f"file name {name!r} must be a relative path inside the checkpoint")
        if not isinstance(blob, bytes):
            raise TypeError(f"file {name!r} holds a {type(blob).__name__}; expected bytes")
    return [(name, len(blob)) for name, blob in blobs.items()]


def _plan(described: Sequence[Mapping[str, Any]]) -> SavePlan:
    """Plan from every rank's description; the same on every rank."""
    for name in ("target", "max_shard_bytes"):
        values = [rank[name] for rank in described]
        if any(value != values[0] for value in values):
            raise ValueError(f"ranks disagree about {name}: {values}; pass the same on every rank")
    held = [
        {part: [BoxMeta.from_json(box) for box in boxes] for part, boxes in rank["parts"].items()}
        for rank in described
    ]
    plan = plan_save(held, max_shard_bytes=described[0]["max_shard_bytes"])
    names = [MANIFEST_NAME, *(file.name for file in plan.files), *plan.indexes]
    names += [name for rank in described for name, _ in rank["files"]]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"several ranks or arguments would write {twice}; give each its own name")
    return plan


def _check_space(target: Path, plan: SavePlan, described: Sequence[Mapping[str, Any]]) -> None:
    folder = next(path for path in target.parents if path.exists())
    needed = plan.num_bytes + _blob_bytes(described)
    needed += _MANIFEST_BYTES_PER_PIECE * (64 + sum(len(file.pieces) for file in plan.files))
    free = free_bytes(folder)
    if needed > free:
        raise OSError(
            errno.ENOSPC,
            f"the checkpoint needs {needed} bytes, but {folder} has {free} free; nothing was "
            "written. Free space or choose another folder",
        )


def _write(
    plan: SavePlan,
    parts: Mapping[str, Sequence[Shard]],
    blobs: Mapping[str, bytes],
    *,
    rank: int,
    folder: Path,
) -> dict[str, Any]:
    if not folder.is_dir():
        raise FileNotFoundError(
            f"this rank does not see {folder}; all ranks must share the checkpoint's file system"
        )
    sums = write_share(plan, parts, rank=rank, folder=folder)
    records = write_blobs(blobs, folder)
    if rank != 0:  # rank 0 does the same when it publishes; other machines have names of their own
        sync_tree(folder)
    return {"sums": sums, "blobs": {name: record.to_json() for name, record in records.items()}}


def _manifest(plan: SavePlan, written: Sequence[Mapping[str, Any]]) -> Manifest:
    records = file_records(plan, [rank["sums"] for rank in written])
    for rank in written:
        for name, record in rank["blobs"].items():
            records[name] = FileRecord.from_json(record)
    return Manifest(files=records)
