"""Any file system of fsspec as a store: those that `unified-ckpt[s3]` has no client for.

fsspec has no conditional write, so `swap` looks first and writes then: two jobs that save one
checkpoint at the same moment are not told apart. One after the other they are.

    location = Location(store=FsspecStore(fsspec.filesystem("memory")), key="run/checkpoint-10")
"""

import errno
import hashlib
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from unified_ckpt.files import Buffer
from unified_ckpt.files.storage.protocol import SWAP_PREFIX, Fetched, part_bytes_for


class FsspecStore:
    """Objects as the files of an fsspec file system.

    Args:
        filesystem: an `fsspec.AbstractFileSystem`; its caches of listings are not used.
        root: a folder or bucket, to which keys are relative.
        url: its name in messages; None for the protocol and the root.
    """

    def __init__(self, filesystem: Any, root: str = "", *, url: str | None = None) -> None:
        self._fs = filesystem
        self._prefix = f"{root.rstrip('/')}/" if root else ""
        protocol = filesystem.protocol
        name = protocol if isinstance(protocol, str) else protocol[0]
        self._url = f"{name}://{root.rstrip('/')}" if url is None else url

    @property
    def url(self) -> str:
        """The protocol and the root, or what was given."""
        return self._url

    def upload(self, key: str, buffers: Iterable[Buffer], *, num_bytes: int) -> None:
        """Write a file; object stores show it when it is closed."""
        path = self._path(key)
        with _as_os_errors(path):
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            file = self._fs.open(path, "wb", block_size=part_bytes_for(num_bytes))
        try:
            for buffer in buffers:
                with _as_os_errors(path):
                    file.write(buffer)
        except BaseException:
            getattr(file, "discard", file.close)()
            self.delete([key])  # some file systems show a file while it is written
            raise
        with _as_os_errors(path):
            file.close()

    def swap(self, key: str, data: bytes, *, old: str | None) -> bool:
        """Compare, then write."""
        found = self.fetch(key)
        if (None if found is None else found.version) != old:
            return False
        parent, slash, _ = key.rpartition("/")
        hidden = f"{parent}{slash}{SWAP_PREFIX}{secrets.token_hex(8)}"
        self.upload(hidden, [data], num_bytes=len(data))
        try:  # whole at any moment, also where a file shows while it is written
            with _as_os_errors(self._path(key)):
                self._fs.mv(self._path(hidden), self._path(key))
        except (ConnectionError, TimeoutError):  # it may be done all the same
            with suppress(OSError):
                self.delete([hidden])
            raise
        except OSError:  # it cannot replace a file by another
            self.upload(key, [data], num_bytes=len(data))
            self.delete([hidden])
        return True

    def fetch(self, key: str) -> Fetched | None:
        """Read a whole file."""
        path = self._path(key)
        try:
            with _as_os_errors(path):
                data = bytes(self._fs.cat_file(path))
        except FileNotFoundError:
            return None
        return Fetched(data=data, version=hashlib.blake2b(data, digest_size=16).hexdigest())

    def read(self, key: str, start: int, num_bytes: int) -> Buffer:
        """Read bytes of a file."""
        path = self._path(key)
        with _as_os_errors(path):
            data: bytes = self._fs.cat_file(path, start=start, end=start + num_bytes)
        return data

    def size(self, key: str) -> int | None:
        """Ask for the size of a file."""
        path = self._path(key)
        self._fs.invalidate_cache()
        try:
            with _as_os_errors(path):
                return int(self._fs.info(path)["size"])
        except FileNotFoundError:
            return None

    def keys(self, prefix: str) -> Sequence[str]:
        """List the files in a folder and below."""
        self._fs.invalidate_cache()
        with _as_os_errors(self._path(prefix)):
            found = self._fs.find(self._path(prefix))
        start = len(self._prefix.lstrip("/"))
        return [path.lstrip("/")[start:] for path in found]

    def children(self, prefix: str) -> Sequence[str]:
        """List the names in a folder."""
        path = self._path(prefix)
        self._fs.invalidate_cache()
        try:
            with _as_os_errors(path):
                found = self._fs.ls(path, detail=False)
        except FileNotFoundError:
            return []
        return sorted({name.rstrip("/").rpartition("/")[2] for name in found})

    def delete(self, keys: Sequence[str]) -> None:
        """Remove files."""
        for key in keys:
            path = self._path(key)
            try:
                with _as_os_errors(path):
                    self._fs.rm_file(path)
            except FileNotFoundError:
                continue

    def _path(self, key: str) -> str:
        return self._prefix + key


@contextmanager
def _as_os_errors(path: str) -> Iterator[None]:
    """Let whatever a client raises be an OSError, as the protocol says."""
    try:
        yield
    except (OSError, MemoryError):
        raise
    except NotImplementedError as error:
        raise OSError(errno.ENOTSUP, f"its file system cannot do that: {error}", path) from error
    except Exception as error:
        raise ConnectionError(f"{path}: {type(error).__name__}: {error}") from error
