"""Files that others put into a checkpoint: a save that replaces it hands them on.

They are those that its manifest does not list. Each gets a second name in the new directory before
that is published, so that no crash loses one.

    keep_files(Path("run/checkpoint-10"), staging.folder)  # ("notes.txt",)
"""

import os
from collections.abc import Collection
from pathlib import Path, PurePath

from unified_ckpt.errors import (
    CheckpointValueError,
    CorruptCheckpointError,
    LoadError,
    StoreError,
)
from unified_ckpt.files import (
    OpenFolder,
    link_file,
    make_folders,
    open_for_write,
    sync_file,
    write_at,
)
from unified_ckpt.files.format import MANIFEST_NAME, Manifest, read_manifest
from unified_ckpt.files.format.tables import TABLES_NAME

_OF_SAVES = (".safetensors", ".safetensors.index.json")  # where no manifest can tell


def keep_files(
    old: Path, new: Path, *, published_with: Collection[str] | None = None
) -> tuple[str, ...]:
    """Give the files that no save wrote to the directory that replaces theirs; return their names.

    Args:
        old: the directory that is replaced.
        new: the one that replaces it.
        published_with: what was kept before `new` got its name; None if it has not got it yet.

    Raises:
        CheckpointValueError: the new directory has another file of such a name. Once it is
            published, the file gets the name `NAME.kept` instead.
    """
    try:
        opened = OpenFolder(old)
    except StoreError:  # this process cannot open it, but it is there
        raise
    except LoadError:  # another save removed it
        return ()
    kept = []
    with opened:
        foreign, is_known = _foreign(opened)
        for name in sorted(foreign - set(published_with or ())):
            target = new / name
            if os.path.lexists(target):
                if not is_known:
                    continue
                target = target.with_name(f"{target.name}.kept")
                if published_with is None:
                    raise CheckpointValueError(
                        f"{old / name} was not written by the save that is there (its manifest "
                        "does not list it), and the new checkpoint has a file of that name; move "
                        "it away"
                    )
            if _keep(opened, name, target):
                kept.append(str(target.relative_to(new)))
    return tuple(kept)


def _foreign(opened: OpenFolder) -> tuple[set[str], bool]:
    """Return the names of files that the manifest does not list, and whether it could be read."""
    try:
        if Manifest.folder_of(opened):
            return _foreign_in_store(opened), True
        manifest = read_manifest(opened)
    except CorruptCheckpointError:
        names = opened.names(of_any_kind=True) - {MANIFEST_NAME, TABLES_NAME}
        return {name for name in names if not name.endswith(_OF_SAVES)}, False
    if manifest is None:  # an empty folder, or one that is being removed
        return set(), True
    return opened.names(of_any_kind=True) - manifest.files.keys() - {MANIFEST_NAME}, True


def _foreign_in_store(opened: OpenFolder) -> set[str]:
    """Return the names of files that no save to `file://` has written."""
    return {
        name
        for name in opened.names(of_any_kind=True) - {MANIFEST_NAME}
        if not (name.startswith("data-") or PurePath(name).name.startswith(".unified-ckpt-"))
    }


def _keep(opened: OpenFolder, name: str, target: Path) -> bool:
    """Give a file a second name, or a copy; False if its owner removed it meanwhile."""
    make_folders(target.parent)
    try:
        if not link_file(opened.fd, name, target):
            raw = opened.read(name)
            with open_for_write(target) as fd:
                write_at(fd, [raw], 0)
                sync_file(fd)
    except (FileNotFoundError, CorruptCheckpointError):
        if opened.size(name) is None:
            return False
        raise
    return True
