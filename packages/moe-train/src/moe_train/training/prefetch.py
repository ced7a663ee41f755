"""Make the batches of the next steps while the present one is computed.

Invariant: what is made for a step depends on the step's first sample alone, so that reading ahead
changes when a batch is made and never what it holds. An error of the background is raised at the
step that needs the batch; nothing is made beyond the last step; no wait is without an end.

    with Prefetcher(make, range(0, 160, 16), depth=2, timeout_s=60) as batches:
        batches.get(0)      # the batches of 16 and 32 are made meanwhile
"""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Generic, TypeVar

from moe_train.errors import MoeTrainError

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """Calls `make` for coming keys in one background thread.

    Args:
        make: pure; called with each key, in the background and in order.
        keys: what will be asked for, in this order; others are made when they are asked for.
        depth: how many are made ahead; 0 makes each when it is asked for, without a thread.
        timeout_s: longest wait for one of them.
    """

    def __init__(
        self, make: Callable[[int], T], keys: range, *, depth: int, timeout_s: float
    ) -> None:
        self._make, self._keys = make, keys
        self._depth, self._timeout_s = depth, timeout_s
        self._coming: dict[int, Future[T]] = {}
        self._thread: ThreadPoolExecutor | None = None
        self._pid = 0

    def __enter__(self) -> "Prefetcher[T]":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def get(self, key: int) -> T:
        """What `make(key)` gives; waits for it when it is not ready.

        Raises:
            MoeTrainError: it was not made within the time limit.
        """
        if self._depth == 0 or key not in self._keys:
            return self._make(key)
        place = self._keys.index(key)
        self._look_ahead(self._keys[place : place + 1 + self._depth])
        coming = self._coming.pop(key)
        if not wait([coming], self._timeout_s).done:
            raise MoeTrainError(
                f"the batch that begins with sample {key} was not read within {self._timeout_s:g} s"
                "; the disk of data.cache_dir is slow or gone: raise parallel.timeout_s, or move it"
            )
        return coming.result()

    def close(self) -> None:
        """Stop the thread; what it has begun is waited for, what it has not is left out."""
        coming, thread = list(self._coming.values()), self._thread
        self._coming, self._thread = {}, None
        if thread is not None and self._pid == os.getpid():
            thread.shutdown(wait=False, cancel_futures=True)
            wait([one for one in coming if not one.cancelled()], self._timeout_s)

    def _look_ahead(self, keys: range) -> None:
        """Have the batches of `keys` made, and forget those that nobody will ask for."""
        if self._thread is None or self._pid != os.getpid():  # a thread does not survive a fork
            self._coming, self._pid = {}, os.getpid()
            self._thread = ThreadPoolExecutor(1, "moe-train-batches")
        for other in [key for key in self._coming if key not in keys]:
            self._coming.pop(other).cancel()
        for key in keys:
            if key not in self._coming:
                self._coming[key] = self._thread.submit(self._make, key)
