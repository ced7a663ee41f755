"""A checkpoint in a store opened for reading: its manifest as it was, and the files that it names.

The files of a manifest never change and belong to it alone (see `saving.commit.draft`), so what is
read is of one checkpoint. If it is replaced meanwhile, files are gone, and the name leads to
another manifest. Listings are not used.

    with StoredFolder(Location(store=store, key="run/checkpoint-10")) as folder:
        raw = folder.read("config.json")
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager

from unified_ckpt.errors import CorruptCheckpointError, LoadError, StoreError
from unified_ckpt.files.format import MANIFEST_NAME, is_tombstone, read_manifest
from unified_ckpt.files.storage import PARTS_AT_ONCE, Fetched, Location, StoredFile

_MOST_TOMBSTONE_BYTES = 128  # a larger object at a manifest's place is one, whole or damaged


class StoredFolder(AbstractContextManager["StoredFolder"]):
    """As `OpenFolder`, of a location.

    Raises:
        LoadError: there is no checkpoint.
        StoreError: (a LoadError) the store does not answer.
        CorruptCheckpointError: its manifest is damaged.
    """

    def __init__(self, location: Location) -> None:
        self.path = location
        found = self._fetch()
        if found is None or is_tombstone(found.data):
            raise LoadError(f"{location}: no such checkpoint; no save has completed it")
        self._found = found
        manifest = read_manifest(self)
        self._names = {*(manifest.files if manifest else ()), MANIFEST_NAME}
        self._files = location / manifest.data if manifest and manifest.data else location
        self._pool = ThreadPoolExecutor(PARTS_AT_ONCE, thread_name_prefix="unified-ckpt-get")

    def close(self) -> None:
        """End the threads that read."""
        self._pool.shutdown()

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def open(self, name: str) -> Iterator[StoredFile]:
        """Return a file; whether it is there is known when it is read.

        Raises:
            CorruptCheckpointError: it is missing; in the body of the `with`.
            StoreError: the store does not answer; in the body.
        """
        with as_load_errors(self.path / name):
            yield StoredFile(location=self._files / name, pool=self._pool)

    def read(self, name: str) -> bytes:
        """Return the bytes of a file; raises as `open`."""
        if name == MANIFEST_NAME:
            return self._found.data
        with self.open(name) as file:
            raw = bytearray(file.num_bytes())
            return bytes(raw[: file.read_at([memoryview(raw)], 0)])

    def size(self, name: str) -> int | None:
        """Return the bytes of a file, None if there is none."""
        if name == MANIFEST_NAME:
            return len(self._found.data)
        place = self._files / name
        with as_load_errors(self.path / name):
            return place.store.size(place.key)

    def listed(self) -> list[str]:
        """Return the names at the top."""
        return sorted({name.partition("/")[0] for name in self.names()})

    def names(self) -> set[str]:
        """Return the names of all files, as the manifest lists them."""
        return set(self._names)

    def leads_here(self) -> bool:
        """Whether the manifest is still the same."""
        found = self._fetch()
        return found is not None and found.data == self._found.data

    def changed_file(self) -> str | None:
        """Return None: the files of a manifest do not change."""
        return None

    def _fetch(self) -> Fetched | None:
        place = self.path / MANIFEST_NAME
        with as_load_errors(place):
            return place.store.fetch(place.key)


def is_stored(location: Location) -> bool:
    """Whether there is a checkpoint, whole or damaged.

    Raises:
        StoreError: the store does not answer.
    """
    place = location / MANIFEST_NAME
    with as_load_errors(place):
        size = place.store.size(place.key)
        if size is None or size > _MOST_TOMBSTONE_BYTES:
            return size is not None
        found = place.store.fetch(place.key)
        return found is not None and not is_tombstone(found.data)


@contextmanager
def as_load_errors(place: Location) -> Iterator[None]:
    """Say what an error of a store means for a checkpoint: an object is missing, or no answer."""
    try:
        yield
    except FileNotFoundError as error:
        raise CorruptCheckpointError(f"{place}: file is missing") from error
    except OSError as error:
        raise StoreError(f"{place}: the store cannot be used: {error}") from error
