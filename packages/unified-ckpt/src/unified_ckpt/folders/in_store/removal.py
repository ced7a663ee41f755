"""The removal of a checkpoint in a store, such that nobody reads half of one.

The manifest goes first: from then on there is no checkpoint of that name, and who is reading it
finds its name gone when a file is missing, which is a `ReplacedCheckpointError`. Then go the files
that the manifest names, and what a listing shows beside them. A removal that was interrupted leaves
files without manifest, which the next `CheckpointManager` of the folder deletes (`Draft.clean`).

    remove_stored(Location(store=store, key="run/checkpoint-10"))
"""

from collections.abc import Iterable
from pathlib import Path

from unified_ckpt.errors import LoadError, StoreError
from unified_ckpt.files.format import MANIFEST_NAME
from unified_ckpt.files.format.tables import TABLES_NAME
from unified_ckpt.files.storage import Location
from unified_ckpt.plans.checkpoint import Checkpoint, as_load_errors, is_stored
from unified_ckpt.saving.commit import Draft


def remove_stored(place: Location) -> None:
    """Remove a checkpoint; one that is gone already is no error. Objects of others stay.

    Raises:
        StoreError: the store does not answer; called again, it goes on.
        CorruptCheckpointError: the manifest does not say which files are the checkpoint's.
    """
    try:
        with Checkpoint(place) as checkpoint:
            manifest = checkpoint.manifest
            names = checkpoint.names()
    except StoreError:
        raise
    except LoadError:
        if is_stored(place):
            raise
        return
    data = manifest.data if manifest is not None else ""
    files = place / data if data else place
    store, first = place.store, (place / MANIFEST_NAME).key
    keys = {(files / name).key for name in names}
    with as_load_errors(place):
        if data:
            keys |= {*store.keys(files.key), (files / TABLES_NAME).key}
        store.delete([first])
        store.delete(sorted(keys - {first}))


def clean_stored(places: Iterable[Path | Location]) -> list[str]:
    """Delete what killed saves and removals left of checkpoints in a store.

    Args:
        places: the names to look at; paths are passed over.

    Returns:
        The last names of those that are no checkpoints.

    Raises:
        StoreError: the store does not answer.
    """
    gone = []
    for place in places:
        if isinstance(place, Location) and not is_stored(place):
            with as_load_errors(place):
                if Draft.clean(place):
                    gone.append(place.name)
    return gone
