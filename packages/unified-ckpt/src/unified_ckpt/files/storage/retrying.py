"""Tries again what failed on the way to a store, within limits.

store = Retrying(FsspecStore(fs, "bucket"), attempts=5)
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TypeVar

from unified_ckpt.files import Buffer
from unified_ckpt.files.storage.protocol import Fetched, ObjectStore

_T = TypeVar("_T")
_FIRST_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True)
class Retrying:
    """A store whose lost connections are made again.

    An upload of more than one buffer is tried once: the buffers are gone. A swap that is made again
    fails on what the one before has written, whose answer was lost; so it is looked for.

    Attributes:
        store: the store.
        attempts: how often a call is made, at most.
        limit_s: no call is made again after so many seconds.
    """

    store: ObjectStore
    attempts: int = 5
    limit_s: float = 60.0

    @property
    def url(self) -> str:
        """As the store's."""
        return self.store.url

    def upload(self, key: str, buffers: Iterable[Buffer], *, num_bytes: int) -> None:
        """As the store's; one buffer is written again if that failed."""
        if isinstance(buffers, list) and len(buffers) == 1:
            self._call(lambda: self.store.upload(key, buffers, num_bytes=num_bytes))
        else:
            self.store.upload(key, buffers, num_bytes=num_bytes)

    def swap(self, key: str, data: bytes, *, old: str | None) -> bool:
        """As the store's; won as well by an earlier attempt whose answer was lost."""
        attempts = count()

        def attempt() -> bool:
            is_first = next(attempts) == 0
            if self.store.swap(key, data, old=old):
                return True
            found = None if is_first else self.store.fetch(key)
            return found is not None and found.data == data

        return self._call(attempt)

    def fetch(self, key: str) -> Fetched | None:
        """As the store's."""
        return self._call(lambda: self.store.fetch(key))

    def read(self, key: str, start: int, num_bytes: int) -> Buffer:
        """As the store's."""
        return self._call(lambda: self.store.read(key, start, num_bytes))

    def size(self, key: str) -> int | None:
        """As the store's."""
        return self._call(lambda: self.store.size(key))

    def keys(self, prefix: str) -> Sequence[str]:
        """As the store's."""
        return self._call(lambda: self.store.keys(prefix))

    def children(self, prefix: str) -> Sequence[str]:
        """As the store's."""
        return self._call(lambda: self.store.children(prefix))

    def delete(self, keys: Sequence[str]) -> None:
        """As the store's."""
        self._call(lambda: self.store.delete(keys))

    def _call(self, work: Callable[[], _T]) -> _T:
        give_up_s = time.monotonic() + self.limit_s
        for attempt in range(self.attempts - 1):
            try:
                return work()
            except (ConnectionError, TimeoutError):
                pause_s = _FIRST_PAUSE_S * 2**attempt
                if time.monotonic() + pause_s > give_up_s:
                    raise
                time.sleep(pause_s)
        return work()
