"""S3, Google Cloud Storage and Azure, through obstore (`pip install 'unified-ckpt[s3]'`).

obstore was chosen over s3fs by measurement (`benchmarks/unified_ckpt_object_store.py`): it needs
half the processor time for the same bytes. It tries lost requests again by itself, with limits.
Credentials, region and endpoint come from the environment, as every client of the store takes them
(`AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT_URL`), or from a store that the caller has made.

    from obstore.store import S3Store

    store = ObstoreClient(S3Store("bucket", region="eu-west-1"), url="s3://bucket")
"""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    NotFoundError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import from_url

from unified_ckpt.errors import CheckpointValueError
from unified_ckpt.files import Buffer
from unified_ckpt.files.storage.protocol import (
    PART_BYTES,
    Fetched,
    StagedBuffers,
    part_bytes_for,
)

_MAX_RETRIES = 6
_RETRY_LIMIT_S = 120.0
# Parts on their way at once: of what lies there already, so that they cost no memory (with 4, where
# obstore's default is 12, an upload takes a third longer); and of what is staged for them.
_PARTS_AT_ONCE, _STAGED_AT_ONCE = 12, 4
_SECRETS = re.compile(r"(?i)\b(sig|signature|token|secret|key|credential)[\w-]*=[^&\s\"]+")


def connect(url: str) -> "ObstoreClient":
    """Return the store of a bucket (`s3://bucket`), as the environment describes it."""
    retries: Any = {
        "max_retries": _MAX_RETRIES,
        "retry_timeout": timedelta(seconds=_RETRY_LIMIT_S),
    }
    try:
        store = from_url(url, retry_config=retries)
    except (BaseError, ValueError) as error:
        raise CheckpointValueError(f"{url}: {_public(error)}") from error
    return ObstoreClient(store, url=url)


class ObstoreClient:
    """Objects of an obstore store.

    Args:
        store: a store of `obstore.store`.
        url: its name in messages.
    """

    def __init__(self, store: Any, *, url: str) -> None:
        self._store = store
        self._url = url

    @property
    def url(self) -> str:
        """As given."""
        return self._url

    def upload(self, key: str, buffers: Iterable[Buffer], *, num_bytes: int) -> None:
        """Put an object, in parts if it is larger than one."""
        with self._errors(key):
            if num_bytes <= PART_BYTES:
                obstore.put(self._store, key, b"".join(buffers), use_multipart=False)
            else:
                is_staged = isinstance(buffers, StagedBuffers)
                obstore.put(
                    self._store,
                    key,
                    map(memoryview, buffers),
                    chunk_size=part_bytes_for(num_bytes),
                    max_concurrency=_STAGED_AT_ONCE if is_staged else _PARTS_AT_ONCE,
                )

    def swap(self, key: str, data: bytes, *, old: str | None) -> bool:
        """Put an object on the condition that it is there as known, or not there."""
        mode: Any = "create" if old is None else {"e_tag": old}
        try:
            with self._errors(key):
                obstore.put(self._store, key, data, mode=mode, use_multipart=False)
        except FileExistsError:
            return False
        except FileNotFoundError:
            if old is None:
                raise  # there is no such bucket
            return False  # what was to be replaced is gone
        return True

    def fetch(self, key: str) -> Fetched | None:
        """Get a whole object."""
        try:
            with self._errors(key):
                found = obstore.get(self._store, key)
                return Fetched(data=bytes(found.bytes()), version=str(found.meta["e_tag"]))
        except FileNotFoundError:
            return None

    def read(self, key: str, start: int, num_bytes: int) -> Buffer:
        """Get a range of an object."""
        with self._errors(key):
            return memoryview(obstore.get_range(self._store, key, start=start, length=num_bytes))

    def size(self, key: str) -> int | None:
        """Ask for the size of an object."""
        try:
            with self._errors(key):
                return obstore.head(self._store, key)["size"]
        except FileNotFoundError:
            return None

    def keys(self, prefix: str) -> Sequence[str]:
        """List the objects below a prefix."""
        with self._errors(prefix):
            batches = obstore.list(self._store, prefix)
            return [found["path"] for batch in batches for found in batch]

    def children(self, prefix: str) -> Sequence[str]:
        """List one level below a prefix."""
        with self._errors(prefix):
            found = obstore.list_with_delimiter(self._store, prefix)
        paths = [*found["common_prefixes"], *(item["path"] for item in found["objects"])]
        return [path.rstrip("/").rpartition("/")[2] for path in paths]

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects in requests of many."""
        with self._errors(self._url):
            if keys:
                obstore.delete(self._store, list(keys))

    @contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        """Turn obstore's errors into those of the protocol, without what is secret in them."""
        where = f"{self._url}/{key}"
        if _first_process() != os.getpid():
            raise PermissionError(
                f"{where}: this process was forked from one that had used an object store, whose "
                "connections do not survive that; start it with the method 'spawn'"
            )
        try:
            yield
        except (FileNotFoundError, NotFoundError) as error:
            raise FileNotFoundError(f"{where}: no such object") from error
        except (AlreadyExistsError, PreconditionError) as error:
            raise FileExistsError(f"{where}: is another one by now") from error
        except (PermissionDeniedError, UnauthenticatedError) as error:
            raise PermissionError(f"{where}: {_public(error)}") from None
        except BaseError as error:
            raise ConnectionError(f"{where}: {_public(error)}") from None


@cache
def _first_process() -> int:
    """The process in which a store was used first; its children inherit the answer."""
    return os.getpid()


def _public(error: Exception) -> str:
    text = str(error).partition("\n\nDebug source")[0]
    return _SECRETS.sub(r"\1=...", text)[:500]
