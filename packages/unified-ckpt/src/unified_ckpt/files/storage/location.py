"""Names of checkpoints that are no paths: a store and a key in it.

as_target("s3://bucket/run/checkpoint-10")  # Location(store=..., key="run/checkpoint-10")
as_target("run/checkpoint-10")  # a Path
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import cast
from urllib.parse import unquote, urlsplit

from unified_ckpt.errors import CheckpointValueError, as_path, check_type, is_url
from unified_ckpt.files.storage.fsspec_store import FsspecStore
from unified_ckpt.files.storage.local import LocalStore, escaped
from unified_ckpt.files.storage.protocol import ObjectStore
from unified_ckpt.files.storage.retrying import Retrying

_BUCKETS = {"s3", "s3a", "gs", "az", "abfs", "abfss"}
_CLIENT = "unified_ckpt.files.storage.obstore_client"
_FSSPEC = "fsspec+"


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """A folder of a store, by its key; `location / "name"` is below it, as with paths.

    Raises:
        CheckpointValueError: the key begins with a slash, or has `.` or `..` among its names.
    """

    store: ObjectStore
    key: str

    def __post_init__(self) -> None:
        check_type("key", self.key, str)
        names = [name for name in self.key.split("/") if name]
        if self.key.startswith("/") or {".", ".."} & set(names):
            raise CheckpointValueError(
                f"key={self.key!r} of a Location; expected names joined by '/', relative to the "
                "store, such as 'run/checkpoint-10': give the rest to the store, as its root"
            )
        object.__setattr__(self, "key", "/".join(names))  # as stores list it

    @property
    def name(self) -> str:
        """The last name of the key."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> "Location":
        """The folder that holds it."""
        return replace(self, key=self.key.rpartition("/")[0])

    @property
    def on_disk(self) -> Path | None:
        """The path on this machine's file systems, None if it is elsewhere."""
        return self.store.root / self.key if isinstance(self.store, LocalStore) else None

    def __truediv__(self, name: str) -> "Location":
        return replace(self, key=f"{self.key}/{name}" if self.key else name)

    def __str__(self) -> str:
        url, key = self.store.url, self.key
        if isinstance(self.store, LocalStore):  # what a file:// URL gives another meaning
            key = escaped(key)
        return f"{url}/{key}" if is_url(url) else f"store://{url}/{key}"  # never a path

    def __repr__(self) -> str:
        return f"Location({str(self)!r})"


def as_target(name: str, value: object) -> "Path | Location":
    """Return an argument that names a checkpoint or a folder of them: a path, or with a URL a key.

    Args:
        name: the argument's, for messages.
        value: a path, a URL (`s3://`, `gs://`, `az://`, `file://`, `fsspec+PROTOCOL://`), or a
            Location.

    Raises:
        CheckpointTypeError: it is none of these.
        CheckpointValueError: the URL is of a kind that is not known, has no key, or holds
            credentials; or the client for it is not installed.
    """
    if isinstance(value, Location):
        return value
    if not isinstance(value, str) or not is_url(value):
        return as_path(name, value)
    url = urlsplit(value)
    if url.username or url.password or url.query or url.fragment:  # not shown: they may be secret
        raise CheckpointValueError(
            f"{name} is a {url.scheme}:// URL with more than a bucket and a key; give credentials "
            "and options in the environment, or in a store: Location(store=..., key=...)"
        )
    key = "/".join(part for part in url.path.split("/") if part)
    if not key or {"..", "."} & set(key.split("/")):
        raise CheckpointValueError(f"{name}={value!r} has no key; name the folder in the bucket")
    if url.scheme.startswith(_FSSPEC):
        return Location(store=_filesystem(f"{url.scheme}://{url.netloc}", key), key=key)
    if url.scheme == "file":
        if url.netloc not in ("", "localhost"):
            raise CheckpointValueError(
                f"{name}={value!r} names the machine {url.netloc!r}; expected three slashes before "
                f"a path: file:///{url.netloc}{url.path}"
            )
        return Location(store=LocalStore("/"), key=unquote(key))
    if url.scheme not in _BUCKETS or not url.netloc:
        raise CheckpointValueError(
            f"{name}={value!r}; known are file:// and {', '.join(sorted(_BUCKETS))} with a bucket; "
            "any other that fsspec knows is fsspec+PROTOCOL://, or give a "
            "Location(store=FsspecStore(filesystem), key=...)"
        )
    return Location(store=_bucket(f"{url.scheme}://{url.netloc}"), key=key)


def shown(value: object) -> str:
    """Return what names a checkpoint as messages may show it: of a URL scheme, host and path."""
    text = str(value)
    if not is_url(text):
        return text
    url = urlsplit(text)
    return f"{url.scheme}://{url.netloc.rpartition('@')[2]}{url.path}"


@cache
def _bucket(url: str) -> ObjectStore:
    """Return the store of a bucket; one for all checkpoints in it, for its open connections."""
    try:
        client = import_module(_CLIENT)
    except ImportError as error:
        raise CheckpointValueError(
            f"{url} needs the package obstore; pip install 'unified-ckpt[s3]'"
        ) from error
    return cast("Callable[[str], ObjectStore]", client.connect)(url)


def _filesystem(url: str, key: str) -> ObjectStore:
    """Return fsspec's file system of a URL, with the root to which the key is relative.

    Lost connections are made again, which not every such file system does by itself.
    """
    try:
        core = import_module("fsspec.core")
        filesystem, path = core.url_to_fs(f"{url.removeprefix(_FSSPEC)}/{key}")
    except (ImportError, ValueError, OSError) as error:
        raise CheckpointValueError(f"{url}: fsspec cannot open it: {error}") from error
    return Retrying(FsspecStore(filesystem, str(path).removesuffix(key), url=url))
