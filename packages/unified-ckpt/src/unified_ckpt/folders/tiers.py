"""Two places for the checkpoints of a run: a fast one (tmpfs), and a persistent one (disk).

The saver process commits each checkpoint in the fast tier first, then in the persistent one, both
from staged memory. A job that dies in between and starts again on the same machine resumes from
the fast tier; `flush_tier` then makes up for the copy that is missing.

    saver = AsyncSaver(config=AsyncSaverConfig(fast_tier="/dev/shm/run"))
    resume_from = last_checkpoint_of_tiers("/dev/shm/run", "/data/run")
"""

import errno
import os
from pathlib import Path

from unified_ckpt.errors import CheckpointValueError, CorruptCheckpointError, LoadError, as_path
from unified_ckpt.files import ReadFolder, free_bytes, make_folders, open_for_write, sync_file
from unified_ckpt.files.format import MANIFEST_NAME
from unified_ckpt.folders.folder import Depth, get_last_checkpoint, step_of
from unified_ckpt.plans.checkpoint import Checkpoint, verify_checkpoint
from unified_ckpt.saving.commit import Staging, clean_leftovers

_COPY_BYTES = 64 * 1024 * 1024


def last_checkpoint_of_tiers(
    fast: Path | str, persistent: Path | str, *, verify: Depth = "quick"
) -> Path | None:
    """Return the newest valid checkpoint of both tiers, the fast one's where both have it.

    Reads only, not collective; either folder may be missing.

    Args:
        fast: the folder of the fast tier.
        persistent: the folder of the run.
        verify: as in `get_last_checkpoint`.
    """
    found = [get_last_checkpoint(folder, verify=verify) for folder in (fast, persistent)]
    return max((path for path in found if path is not None), key=step_of, default=None)


def flush_tier(fast: Path | str, persistent: Path | str) -> Path | None:
    """Copy the fast tier's newest checkpoint to the persistent one, if that has no newer or equal.

    One process calls it, while nothing is saved; for a job that died before the saver could.

    Returns:
        The copy, None if none was needed.

    Raises:
        OSError: the disk is full, or cannot be written.
        CorruptCheckpointError: the checkpoint changed, or was damaged on the way.
    """
    source, last = get_last_checkpoint(fast, verify="full"), get_last_checkpoint(persistent)
    if source is None or (last is not None and step_of(last) >= step_of(source)):
        return None
    target = as_path("persistent", persistent) / source.name
    copy_checkpoint(source, target)
    return target


def copy_checkpoint(source: Path | str, target: Path | str) -> None:
    """Copy a checkpoint, committed by one rename like every save; one process calls it.

    Raises:
        LoadError: the source is no complete checkpoint of this package.
        CorruptCheckpointError: a byte of the copy differs from its checksum; nothing is published.
        OSError: the disk is full, or cannot be written.
        CheckpointValueError: the target exists and is no checkpoint.
    """
    source, target = as_path("source", source), Path(os.path.realpath(as_path("target", target)))
    with Checkpoint(source) as checkpoint:
        _copy(checkpoint, target)


def _copy(checkpoint: Checkpoint, target: Path) -> None:
    source, manifest = checkpoint.folder, checkpoint.manifest
    if manifest is None:
        raise LoadError(f"{source} has no {MANIFEST_NAME}, so it is no complete checkpoint")
    clean_leftovers(target.parent)
    staging = Staging.make(target)
    try:
        needed, free = sum(f.num_bytes for f in manifest.files.values()), free_bytes(staging.folder)
        if needed > free:
            raise OSError(
                errno.ENOSPC, f"{target} needs {needed} bytes, but its disk has {free} free"
            )
        for name in (*manifest.files, MANIFEST_NAME):
            _copy_file(checkpoint.opened, name, staging.folder / name)
        problems = verify_checkpoint(staging.folder).problems
        if problems:
            raise CorruptCheckpointError(f"the copy of {source} is damaged: {problems[0]}")
        staging.publish()
    finally:
        staging.close()


def _copy_file(source: ReadFolder, name: str, target: Path) -> None:
    make_folders(target.parent)
    with open_for_write(target) as writer, source.open(name) as reader:
        if not isinstance(reader, int):
            raise CheckpointValueError(f"{source.path} lies in a store; `load` reads it from there")
        at = 0
        while done := os.sendfile(writer, reader, at, _COPY_BYTES):
            at += done
        sync_file(writer)
