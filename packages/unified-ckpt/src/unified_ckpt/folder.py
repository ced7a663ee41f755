"""The folder of a run: the newest checkpoint that is complete, and the removal of old ones.

Neither trusts a name, a date or the highest number alone: a checkpoint counts only if its manifest
is intact and every file that it lists is there with its size.

    resume_from = get_last_checkpoint("run")  # run/checkpoint-200, or None
"""

import re
from collections.abc import Iterator
from pathlib import Path

from unified_ckpt.commit import hidden_name
from unified_ckpt.errors import CorruptCheckpointError
from unified_ckpt.files import remove_tree, sync_folder
from unified_ckpt.manifest import check_sizes, read_manifest

_CHECKPOINT = re.compile(r"checkpoint-(\d+)\Z")


def is_complete(checkpoint: Path | str) -> bool:
    """Whether a directory has an intact manifest and all its files have their sizes.

    Bytes are not compared with checksums; `verify_checkpoint` does that.
    """
    try:
        manifest = read_manifest(Path(checkpoint))
    except CorruptCheckpointError:
        return False
    return manifest is not None and not check_sizes(Path(checkpoint), manifest)


def get_last_checkpoint(folder: Path | str) -> Path | None:
    """Return the complete `checkpoint-N` with the highest N, or None; reads only.

    A folder that does not exist holds no checkpoint.
    """
    return next(_complete(Path(folder)), None)


def rotate(folder: Path | str, keep: int) -> list[Path]:
    """Remove all complete `checkpoint-N` but the `keep` newest; return what was removed.

    One process calls it, after a save has returned. Each directory first gets a hidden name, so
    that none is ever half there; what is not complete is left for a person to look at.

    Raises:
        ValueError: `keep` is less than 1.
    """
    if keep < 1:
        raise ValueError(f"keep={keep} would remove every checkpoint; keep at least 1")
    old = list(_complete(Path(folder)))[keep:]
    for checkpoint in old:
        hidden = hidden_name(checkpoint, "tmp")
        checkpoint.rename(hidden)
        sync_folder(checkpoint.parent)
        remove_tree(hidden)
    return old


def _complete(folder: Path) -> Iterator[Path]:
    if not folder.is_dir():
        return
    found = [(int(m[1]), p) for p in folder.iterdir() if (m := _CHECKPOINT.match(p.name))]
    for _, path in sorted(found, reverse=True):
        if is_complete(path):
            yield path
