"""The moment at which a checkpoint in a store exists: one small object, its manifest, is swapped.

A save writes its files below a name of its own, `CHECKPOINT/data-TOKEN/`, which nobody reads; then
`CHECKPOINT/manifest.json`, which names that folder. The manifest is written only if it is still the
one that was there when the save began, so of two saves of one name at most one commits, and whoever
reads a manifest finds all that it names. No lease and no clock is needed for that.

What the new manifest does not name (the checkpoint that was replaced, what killed saves left) is
listed before the commit and deleted after it: a save whose files are on that list began before the
commit, so it cannot commit any more. Objects of others below the checkpoint's name stay.

Under a name without a manifest nothing shows which files are those of a save that runs. Therefore
each save writes a mark beside its files first, and after its manifest it looks whether the mark is
still there. Who cleans (`Draft.clean`) deletes marks first, and then looks whether there is a
manifest by now. So either the cleaner sees the manifest and leaves the files alone, or the save
sees that its mark is gone and takes its manifest back; never does neither see the other.

    draft = Draft.make(Location(store=store, key="run/checkpoint-10"))
    ...  # every rank writes objects below draft.folder
    draft.commit(records, lambda: {})
"""

import secrets
import warnings
from collections.abc import Callable, Iterable, Mapping

from unified_ckpt.errors import CheckpointValueError, LeftoverFilesWarning, SaveError
from unified_ckpt.files.format import MANIFEST_NAME, encode_manifest
from unified_ckpt.files.storage import Location
from unified_ckpt.saving.commit.writer import write_blobs

_DATA = "data-"
_MARK = ".draft"


class Draft:
    """The files of a save before their manifest; owned by one process, filled by all ranks.

    Attributes:
        target: the checkpoint.
        folder: where the files go.
    """

    def __init__(self, target: Location, *, old: str | None) -> None:
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
        found = target.store.fetch((target / MANIFEST_NAME).key)
        if found is None:
            cls.check_free(target)
        draft = cls(target, old=None if found is None else found.version)
        target.store.upload(draft._mark, [_MARK.encode()], num_bytes=len(_MARK))
        return draft

    @staticmethod
    def check_free(target: Location) -> None:
        """Refuse a name without a manifest under which others keep objects.

        Raises:
            CheckpointValueError: there are some.
        """
        others = [key for key in target.store.keys(target.key) if not _is_data(target, key)]
        if others:
            raise CheckpointValueError(
                f"{target} holds {others[0]!r} and no {MANIFEST_NAME}, so it is not a "
                "checkpoint that may be replaced; choose another checkpoint_id"
            )

    @staticmethod
    def clean(target: Location) -> bool:
        """Delete what killed saves left under a name without a manifest; return whether any did.

        A save that runs there meanwhile fails, or has committed by then and keeps its files.
        """
        store, manifest = target.store, (target / MANIFEST_NAME).key
        keys = [key for key in store.keys(target.key) if _is_data(target, key)]
        folders = {key[len(target.key) + 1 :].partition("/")[0] for key in keys}
        store.delete([(target / folder / _MARK).key for folder in sorted(folders)])
        if store.size(manifest) is not None:
            return False
        store.delete(keys)
        return bool(keys)

    def commit(
        self, records: Mapping[str, bytes], keys: Callable[[], Mapping[str, Mapping[str, str]]]
    ) -> bool:
        """Write the manifest; return whether a checkpoint was replaced. Arguments as of `Staging`.

        Raises:
            SaveError: another save of that name has committed meanwhile.
            OSError: the store did not answer, and whether it has the manifest is not known.
        """
        store, key = self.target.store, self._manifest
        blobs = encode_manifest(records, keys, data=self.folder.name)
        raw = blobs.pop(MANIFEST_NAME)
        write_blobs(blobs, self.folder)
        done_with = [k for k in store.keys(self.target.key) if _is_data(self.target, k)]
        self._may_delete = False  # from now on the files may be those of the checkpoint
        if not self._swap(key, raw):
            self._may_delete = True
            raise SaveError(
                f"{self.target}: another save has written a checkpoint of that name since this one "
                "began; let only one job save there"
            )
        if self._old is None and store.size(self._mark) is None:
            store.delete([key])
            self._may_delete = True
            raise SaveError(
                f"{self.target}: another job has removed the files of this save while it ran, as "
                "what a killed save left; let only one job save there"
            )
        old = [k for k in done_with if not k.startswith(f"{self.folder.key}/")]
        self._delete(lambda: [*old, self._mark], "what the checkpoint before had written")
        return self._old is not None

    @property
    def _manifest(self) -> str:
        return (self.target / MANIFEST_NAME).key

    @property
    def _mark(self) -> str:
        return (self.folder / _MARK).key

    def _swap(self, key: str, raw: bytes) -> bool:
        """Swap the manifest; where no answer came, look whether it is there."""
        store = self.target.store
        try:
            if store.swap(key, raw, old=self._old):
                return True
        except (ConnectionError, TimeoutError):
            found = store.fetch(key)
            if found is None or found.data != raw:
                raise  # it may still be on its way
            return True
        found = store.fetch(key)  # the client may have asked twice, and the first time won
        return found is not None and found.data == raw

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


def _is_data(target: Location, key: str) -> bool:
    return key.startswith(f"{target.key}/{_DATA}")
