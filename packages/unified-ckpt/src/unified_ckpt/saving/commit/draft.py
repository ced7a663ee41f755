"""The moment at which a checkpoint in a store exists: one small object, its manifest, is swapped.

A save writes its files below a name of its own, `CHECKPOINT/data-TOKEN/`, which nobody reads; then
`CHECKPOINT/manifest.json`, which names that folder. The manifest is written only if it is still the
one that was there when the save began, so of two saves of one name at most one commits, and whoever
reads a manifest finds all that it names. No lease and no clock is needed for that.

What the new manifest does not name (the checkpoint that was replaced, what killed saves left) is
listed before the commit and deleted after it: a save whose files are on that list began before the
commit, so it cannot commit any more. Objects of others below the checkpoint's name stay.

    draft = Draft.make(Location(store=store, key="run/checkpoint-10"))
    ...  # every rank writes objects below draft.folder
    draft.commit(Manifest(files=records))
"""

import secrets
from contextlib import suppress
from dataclasses import replace

from unified_ckpt.errors import CheckpointValueError, SaveError
from unified_ckpt.files.format import MANIFEST_NAME, Manifest, encode_manifest
from unified_ckpt.files.storage import Location

_DATA = "data-"


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
            others = [key for key in target.store.keys(target.key) if not _is_data(target, key)]
            if others:
                raise CheckpointValueError(
                    f"{target} holds {others[0]!r} and no {MANIFEST_NAME}, so it is not a "
                    "checkpoint that may be replaced; choose another checkpoint_id"
                )
        return cls(target, old=None if found is None else found.version)

    def commit(self, manifest: Manifest) -> bool:
        """Write the manifest; return whether a checkpoint was replaced.

        Raises:
            SaveError: another save of that name has committed meanwhile.
            OSError: the store did not answer, and whether it has the manifest is not known.
        """
        store, key = self.target.store, (self.target / MANIFEST_NAME).key
        raw = encode_manifest(replace(manifest, data=self.folder.name))
        done_with = [k for k in store.keys(self.target.key) if _is_data(self.target, k)]
        self._may_delete = False  # from now on the files may be those of the checkpoint
        if not self._swap(key, raw):
            self._may_delete = True
            raise SaveError(
                f"{self.target}: another save has written a checkpoint of that name since this one "
                "began; let only one job save there"
            )
        with suppress(OSError):  # the next save of that name deletes them
            store.delete([k for k in done_with if not k.startswith(f"{self.folder.key}/")])
        return self._old is not None

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
            with suppress(OSError):
                store = self.folder.store
                store.delete(store.keys(self.folder.key))


def _is_data(target: Location, key: str) -> bool:
    return key.startswith(f"{target.key}/{_DATA}")
