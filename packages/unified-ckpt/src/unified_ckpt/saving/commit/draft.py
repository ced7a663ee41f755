"""The moment at which a checkpoint in a store exists: one small object, its manifest, is swapped.

A save writes its files below a name of its own, `CHECKPOINT/data-TOKEN/`, which nobody reads; then
`CHECKPOINT/manifest.json`, which names that folder. The manifest is written only if what stood
there when the save began still does, so of two saves of one name at most one commits, and whoever
reads a manifest finds all that it names. No lease and no clock is needed for that.

What the new manifest does not name (the checkpoint that was replaced, what killed saves left) is
listed before the commit and deleted after it: a save whose files are on that list began before the
commit, so it cannot commit any more. Objects of others below the checkpoint's name stay.

The same holds for who deletes what killed saves left under a name without a manifest
(`Draft.clean`): the list first, then a tombstone in the manifest's place, then the files. A save
that still runs, or a manifest that is still on its way though its save is dead, comes too late.

    draft = Draft.make(Location(store=store, key="run/checkpoint-10"))
    ...  # every rank writes objects below draft.folder
    draft.commit(records, lambda: {})
"""

import secrets
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from unified_ckpt.errors import (
    CheckpointValueError,
    CorruptCheckpointError,
    LeftoverFilesWarning,
    SaveError,
)
from unified_ckpt.files.format import (
    MANIFEST_NAME,
    Manifest,
    encode_manifest,
    is_tombstone,
    make_tombstone,
)
from unified_ckpt.files.format.tables import TABLES_NAME
from unified_ckpt.files.storage import Fetched, Location
from unified_ckpt.plans.checkpoint import StoredFolder
from unified_ckpt.saving.commit.writer import write_blobs

_DATA = "data-"


class Draft:
    """The files of a save before their manifest; owned by one process, filled by all ranks.

    Attributes:
        target: the checkpoint.
        folder: where the files go.
    """

    def __init__(self, target: Location, *, old: Fetched | None) -> None:
        self.target = target
        self.folder = target / f"{_DATA}{secrets.token_hex(8)}"
        self._old = old
        self._may_delete = True

    @classmethod
    def make(cls, target: Location) -> "Draft":
        """Begin a save.

        Raises:
            CheckpointValueError: there are objects of that name that are no checkpoint.
        """
        found = target.store.fetch(_manifest_key(target))
        if not _is_manifest(found):
            cls.check_free(target)
        return cls(target, old=found)

    @staticmethod
    def check_free(target: Location) -> None:
        """Refuse a name without a manifest under which others keep objects.

        Raises:
            CheckpointValueError: there are some.
        """
        own = _manifest_key(target)  # a tombstone
        others = [k for k in target.store.keys(target.key) if k != own and not _is_data(target, k)]
        if others:
            raise CheckpointValueError(
                f"{target} holds {others[0]!r} and no {MANIFEST_NAME}, so it is not a "
                "checkpoint that may be replaced; choose another checkpoint_id"
            )

    @staticmethod
    def clean(target: Location) -> bool:
        """Delete what killed saves left under a name without a manifest.

        A save that runs there meanwhile fails, or has committed by then and keeps its files.

        Returns:
            Whether there is no manifest now.
        """
        store, key = target.store, _manifest_key(target)
        left = [k for k in store.keys(target.key) if _is_data(target, k)]
        found = store.fetch(key)
        if _is_manifest(found):
            return False
        if left:
            if not _swap(target, make_tombstone(), found):
                return not _is_manifest(store.fetch(key))
            store.delete(left)
        return True

    def commit(
        self, records: Mapping[str, bytes], keys: Callable[[], Mapping[str, Mapping[str, str]]]
    ) -> bool:
        """Write the manifest; return whether a checkpoint was replaced. Arguments as of `Staging`.

        Raises:
            SaveError: another save of that name has committed meanwhile.
            OSError: the store did not answer, and whether it has the manifest is not known.
        """
        store = self.target.store
        blobs = encode_manifest(records, keys, data=self.folder.name)
        raw = blobs.pop(MANIFEST_NAME)
        write_blobs(blobs, self.folder)
        done_with = [k for k in store.keys(self.target.key) if _is_data(self.target, k)]
        done_with += self._files_beside()
        self._may_delete = False  # from now on the files may be those of the checkpoint
        if not _swap(self.target, raw, self._old):
            self._may_delete = True
            raise SaveError(f"{self.target}: {self._lost_to()}; let only one job save there")
        old = [k for k in done_with if not k.startswith(f"{self.folder.key}/")]
        self._delete(lambda: old, "what the checkpoint before had written")
        return _is_manifest(self._old)

    def _files_beside(self) -> list[str]:
        """Return what the old manifest lists beside itself, as one of a directory does.

        Left there, it would be the weights that transformers finds under the checkpoint's name.
        """
        if self._old is None or is_tombstone(self._old.data) or Manifest.folder_in(self._old.data):
            return []
        with suppress(CorruptCheckpointError), StoredFolder(self.target) as old:
            names = {*old.names(), TABLES_NAME} - {MANIFEST_NAME}
            return sorted((self.target / name).key for name in names)
        return []

    def _lost_to(self) -> str:
        found = self.target.store.fetch(_manifest_key(self.target))
        if found is not None and not _is_manifest(found):
            return (
                "another job has removed the files of this save while it ran, as what a killed "
                "save left"
            )
        return "another save has written or removed a checkpoint of that name since this one began"

    def close(self) -> None:
        """Delete what a save that failed has written; a save that could not tell keeps it."""
        if self._may_delete:
            store = self.folder.store
            self._delete(lambda: store.keys(self.folder.key), "what a failed save had written")

    def _delete(self, keys: Callable[[], Iterable[str]], what: str) -> None:
        """Delete what nobody reads; where the store does not, the next save of that name does."""
        try:
            self.target.store.delete(list(keys()))
        except OSError as error:
            warnings.warn(
                f"{self.target}: {what} was not deleted ({error}); the next save of that name "
                "does so",
                LeftoverFilesWarning,
                stacklevel=3,
            )


def _swap(target: Location, raw: bytes, old: Fetched | None) -> bool:
    """Write in the manifest's place; where no answer came, look whether it is there."""
    store, key = target.store, _manifest_key(target)
    try:
        if store.swap(key, raw, old=None if old is None else old.version):
            return True
    except (ConnectionError, TimeoutError):
        found = store.fetch(key)
        if found is None or found.data != raw:
            raise  # it may still be on its way
        return True
    found = store.fetch(key)  # the client may have asked twice, and the first time won
    return found is not None and found.data == raw


def _is_manifest(found: Fetched | None) -> bool:
    return found is not None and not is_tombstone(found.data)


def _manifest_key(target: Location) -> str:
    return (target / MANIFEST_NAME).key


def _is_data(target: Location, key: str) -> bool:
    return key.startswith(f"{target.key}/{_DATA}")
