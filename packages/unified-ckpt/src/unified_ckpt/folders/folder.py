"""The folder of a run: the newest checkpoint that is valid, and the removal of old ones.

Neither trusts a name, a date or the highest number alone: a checkpoint counts only if its manifest
is intact and every file that it lists is there with its size. One that is newer but damaged is
passed over with a warning that says why, so that nobody resumes from an old one unknowingly. The
same holds in a store, where a folder is a prefix; if the store does not answer, that is an error,
since an older checkpoint is not the newest one.

    resume_from = get_last_checkpoint("run")  # run/checkpoint-200, or None
"""

import os
import re
import warnings
from collections.abc import Callable, Collection, Container, Iterator
from pathlib import Path
from typing import Literal, overload

from unified_ckpt.errors import (
    CheckpointTypeError,
    CheckpointValueError,
    DamagedCheckpointWarning,
    LoadError,
    StoreError,
    check_type,
)
from unified_ckpt.files import remove_tree, rename, sync_folder
from unified_ckpt.files.format import MANIFEST_NAME, Manifest, check_sizes, read_header
from unified_ckpt.files.storage import Location, as_target
from unified_ckpt.folders.in_store import read_note, remove_stored
from unified_ckpt.plans.checkpoint import (
    Checkpoint,
    check_bytes,
    is_stored,
    read_checkpoint,
    verify_opened,
)
from unified_ckpt.saving.commit import Draft, check_replaceable, hidden_name

_CHECKPOINT = re.compile(r"checkpoint-(\d+)\Z")
_SMALL_BYTES = 1024 * 1024  # files up to this size are compared with their checksums at once

Depth = Literal["quick", "full"]


def is_complete(checkpoint: Path | str | Location) -> bool:
    """Whether a checkpoint has an intact manifest and all its files have their sizes.

    Bytes are not compared with checksums; `verify_checkpoint` does that.

    Raises:
        StoreError: the store does not answer.
    """
    try:
        return read_checkpoint(checkpoint, _size_fault) is None
    except StoreError:
        raise
    except LoadError:
        return False


def find_fault(checkpoint: Path | str | Location, verify: Depth = "quick") -> str | None:
    """Say why there is no valid checkpoint, or None if it is one; reads only.

    Args:
        checkpoint: the directory, URL or location.
        verify: `quick` compares the manifest, all sizes, the headers and small files with their
            checksums; `full` compares every byte.

    Raises:
        CheckpointValueError: `verify` is neither `quick` nor `full`.
        StoreError: the store does not answer.
    """
    check_depth(verify)
    return _check(checkpoint, verify)[0]


def _check(checkpoint: Path | str | Location, verify: Depth) -> tuple[str | None, str]:
    """Return the fault, and the identity of the checkpoint that was looked at."""

    def look(opened: Checkpoint) -> tuple[str | None, str]:
        fault = _size_fault(opened)
        if fault is None and opened.manifest is not None:
            _check_small(opened, opened.manifest)
            if verify == "full":
                fault = next((str(problem) for problem in verify_opened(opened).problems), None)
        return fault, opened.identity

    try:
        return read_checkpoint(checkpoint, look)
    except StoreError:
        raise
    except (LoadError, OSError) as error:
        return str(error), ""


def _size_fault(checkpoint: Checkpoint) -> str | None:
    """Say which file of an open checkpoint has not its size, or that it is no checkpoint."""
    if checkpoint.manifest is None:
        return f"it has no {MANIFEST_NAME}, so no save has completed it"
    problems = check_sizes(checkpoint.opened, checkpoint.manifest)
    if problems and not checkpoint.opened.leads_here():
        raise checkpoint.replaced()
    return next(iter(problems), None)


def _check_small(checkpoint: Checkpoint, manifest: Manifest) -> None:
    for name, record in manifest.files.items():
        if name.endswith(".safetensors"):
            raw, _ = read_header(checkpoint.opened, name)
            check_bytes(raw, record, checkpoint.folder / name, whole=False)
        elif record.num_bytes <= _SMALL_BYTES:
            checkpoint.read_file(name)


@overload
def get_last_checkpoint(folder: Path, *, verify: Depth = ...) -> Path | None: ...
@overload
def get_last_checkpoint(
    folder: str | Location, *, verify: Depth = ...
) -> Path | Location | None: ...
def get_last_checkpoint(
    folder: Path | str | Location, *, verify: Depth = "quick"
) -> Path | Location | None:
    """Return the valid `checkpoint-N` with the highest N, or None; reads only, not collective.

    A folder that does not exist holds no checkpoint. A newer one that is damaged is passed over
    with a `DamagedCheckpointWarning` that names it and says why.

    Args:
        folder: the folder of a run, as a path, URL or location.
        verify: how much is compared with checksums, as in `find_fault`.

    Raises:
        StoreError: the store does not answer.
    """
    return next(valid_checkpoints(folder, verify=verify), None)


def valid_checkpoints(
    folder: Path | str | Location, *, verify: Depth = "quick"
) -> Iterator[Path | Location]:
    """Yield the valid `checkpoint-N` from the newest to the oldest; warn of each that is not.

    Raises:
        CheckpointValueError: `verify` is neither `quick` nor `full`.
        StoreError: the store does not answer.
    """
    for place, _ in checked_checkpoints(folder, verify=verify):
        yield place


def _warn(line: str) -> None:
    warnings.warn(line, DamagedCheckpointWarning, stacklevel=5)


def checked_checkpoints(
    folder: Path | str | Location,
    *,
    verify: Depth = "quick",
    passed_over: Callable[[str], None] = _warn,
) -> Iterator[tuple[Path | Location, str]]:
    """As `valid_checkpoints`, each with its identity (`Checkpoint.identity`) when it was checked.

    A job that saves and rotates may remove all that was listed before it is looked at, so a folder
    in which nothing is found is listed again, until it holds the same names twice.

    Args:
        folder, verify: as of `valid_checkpoints`.
        passed_over: called with a line for each checkpoint that is damaged; warns if not given.

    Raises:
        CheckpointValueError, StoreError: as `valid_checkpoints`.
    """
    check_depth(verify)
    place, damaged = as_target("folder", folder), set[str]()
    before, found = list[Path | Location](), False
    while not found and (listed := numbered_checkpoints(place)) != before:
        before = listed
        for path in listed:
            if path.name in damaged or (isinstance(path, Location) and not is_stored(path)):
                continue  # of a save that has not ended, or of a checkpoint that was removed
            fault, identity = _check(path, verify)
            if fault is None:
                found = True
                yield path, identity
            elif _has_name(path):  # else it was removed meanwhile
                damaged.add(path.name)
                passed_over(f"{path} is passed over, an older checkpoint is looked for: {fault}")


def check_depth(verify: Depth) -> None:
    """Refuse an unknown `verify`."""
    if verify not in ("quick", "full"):
        raise CheckpointValueError(f"verify={verify!r}; expected 'quick' or 'full'")


def _has_name(path: Path | Location) -> bool:
    return is_stored(path) if isinstance(path, Location) else os.path.lexists(path)


def step_of(checkpoint: Path | Location) -> int:
    """Return N of `checkpoint-N`."""
    match = _CHECKPOINT.match(checkpoint.name)
    if match is None:
        raise CheckpointValueError(f"{checkpoint} is not named checkpoint-N")
    return int(match[1])


def rotate(
    folder: Path | str | Location, keep: int, *, protect: Collection[Path | str | Location] = ()
) -> list[Path | Location]:
    """Remove all complete `checkpoint-N` but the `keep` newest; return what was removed.

    One process calls it, after a save has returned. Each directory first gets a hidden name (in a
    store its manifest goes first), so that none is ever half there; what is not complete is left
    for a person to look at. A load that still reads one raises `ReplacedCheckpointError`.

    A symbolic link is no checkpoint of its own: it is none of the newest, only the link is removed,
    and what a link leads to that stays in the folder (`best`, `checkpoint-9`) stays as well.

    Args:
        folder: the folder of a run.
        keep: how many of the newest stay.
        protect: others that stay, for example the best one; each named as the folder is, by its
            path, URL or location.

    Raises:
        CheckpointTypeError: `protect` is one name, and no collection of them.
        CheckpointValueError: `keep` is less than 1, or what is protected is not in the folder.
        StoreError: the store does not answer.
    """
    check_type("keep", keep, int)
    if keep < 1:
        raise CheckpointValueError(f"keep={keep} would remove every checkpoint; keep at least 1")
    place = as_target("folder", folder)
    kept = _linked_in(place) | _protected(place, protect)
    old, left = list[Path | Location](), keep
    for path in [path for path in numbered_checkpoints(place) if is_complete(path)]:
        if left:  # a link is none of the newest, but may lead to an older one
            kept |= _real_names(path)
            left -= not _is_link(path)
        else:
            old.append(path)
    old = [path for path in old if not _real_names(path) & kept]
    for checkpoint in old:
        on_disk = _on_disk(checkpoint)
        if isinstance(checkpoint, Location) and not _is_link(checkpoint):
            remove_stored(checkpoint)
        elif on_disk is not None:
            _remove(on_disk)
    return old


def _protected(folder: Path | Location, protect: Collection[Path | str | Location]) -> set[str]:
    """Return the names without links of what stays; refuse what could be none of a folder."""
    if isinstance(protect, str | os.PathLike | Location):
        raise CheckpointTypeError(f"protect is {protect!s}; expected a list of such names")
    (inside,), kept = _real_names(folder), set[str]()
    for each in protect:
        place = as_target("protect", each)
        names = _real_names(place)
        if not {inside} & (_real_names(place.parent) | {name.rpartition("/")[0] for name in names}):
            raise CheckpointValueError(
                f"protect has {each!s}, which is not in {folder}, so it would protect nothing; "
                f"name it as {folder / 'checkpoint-N'}"
            )
        kept |= names
    return kept


def _on_disk(path: Path | Location) -> Path | None:
    return path.on_disk if isinstance(path, Location) else path


def _is_link(path: Path | Location) -> bool:
    on_disk = _on_disk(path)
    return on_disk is not None and on_disk.is_symlink()


def check_no_link(path: Path | Location) -> None:
    """Refuse to save a step under a link's name, which would replace what the link leads to.

    Raises:
        CheckpointValueError: it is a link.
    """
    on_disk = _on_disk(path)
    if on_disk is not None and on_disk.is_symlink():
        raise CheckpointValueError(
            f"{path} is a link to {os.readlink(on_disk)}, which a save would replace; remove the "
            "link, or give it another name"
        )


def _real_names(path: Path | Location) -> set[str]:
    """Return the name that a checkpoint has without links."""
    on_disk = _on_disk(path)
    return {str(path) if on_disk is None else os.path.realpath(on_disk)}


def _linked_in(folder: Path | Location) -> set[str]:
    """Return what links of other names lead to (`best`, `latest`), and the folders it is in."""
    on_disk = _on_disk(folder)
    if on_disk is None or not on_disk.is_dir():
        return set()
    links = [
        e.path for e in os.scandir(on_disk) if e.is_symlink() and not _CHECKPOINT.match(e.name)
    ]
    real = [Path(os.path.realpath(link)) for link in links]
    return {str(each) for path in real for each in (path, *path.parents)}


def _remove(checkpoint: Path) -> None:
    hidden = hidden_name(checkpoint, "tmp")
    rename(checkpoint, hidden)
    sync_folder(checkpoint.parent)
    remove_tree(hidden)


def check_steps_free(folder: Path | str | Location, steps: Container[int]) -> None:
    """Refuse steps whose `checkpoint-N` could not be written, before any of them is trained.

    A save replaces a complete checkpoint; it never replaces a file, a link's target, or a folder
    without manifest.
    In a store it replaces nothing under a name without manifest but what a killed save left.

    Args:
        folder: the folder of a run; it need not exist.
        steps: the steps that the run may save, for example `range(101, 201)`.

    Raises:
        CheckpointValueError: names the first thing that stands in the way.
    """
    for path in reversed(numbered_checkpoints(as_target("folder", folder))):
        if step_of(path) in steps:
            check_no_link(path)
            try:
                if not isinstance(path, Location):
                    check_replaceable(path)
                elif not is_stored(path):
                    Draft.check_free(path)
            except ValueError as error:
                raise CheckpointValueError(
                    f"{path} is no complete checkpoint, so no save may replace it, but the run "
                    f"will come to step {step_of(path)}; move it away"
                ) from error


def numbered_checkpoints(folder: Path | Location) -> list[Path | Location]:
    """Return every `checkpoint-N`, valid or not, the highest N first.

    In a store those that a listing shows, and those that a `CheckpointManager` has noted, of which
    some may not be there (any more).

    Raises:
        LoadError: the folder cannot be listed.
    """
    names = _names_in(folder)
    found = [(int(m[1]), name) for name in names if (m := _CHECKPOINT.match(name))]
    return [folder / name for _, name in sorted(found, reverse=True)]


def _names_in(folder: Path | Location) -> Collection[str]:
    if isinstance(folder, Location):
        try:
            listed, noted = folder.store.children(folder.key), read_note(folder)
        except OSError as error:
            raise StoreError(f"{folder} cannot be listed: {error}") from error
        return {*listed, *(() if noted is None else noted[0].names)}
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise LoadError(f"{folder} cannot be listed: {error.strerror}") from error
