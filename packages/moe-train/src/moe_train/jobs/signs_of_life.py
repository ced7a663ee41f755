"""Which ranks of a job still run: a thread of each counts up an entry of the job's store.

A rank that is stopped or killed counts no further. Who waits for one that waits for it can name it
all the same: it looks twice at what all have counted.

    alive = SignsOfLife()
    alive.begin()                   # when there are process groups
    alive.silent()                  # "rank 3 has given no sign of life for 2 s: ..."
    alive.end()
"""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar, final

import torch.distributed as dist

T = TypeVar("T")
_KEY = "moe_train/alive/{}"
_ENDED = "ended"
_PERIOD_S = 0.5
_SILENT_S = 4 * _PERIOD_S
_ANSWER_S = 2.0  # a store whose host has stopped does not answer


def answer_of(store: Callable[[], T]) -> T:
    """Return what a store answers.

    Raises:
        TimeoutError: nothing within 2 s.
        RuntimeError: the store is gone.
    """
    answers: list[T] = []
    errors: list[RuntimeError] = []

    def ask() -> None:
        try:
            answers.append(store())
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_ANSWER_S)
    if errors:
        raise errors[0]
    if not answers:
        raise TimeoutError(f"the job's store has not answered for {_ANSWER_S:g} s")
    return answers[0]


@final
class SignsOfLife:
    """Those of one job on this rank; none before `begin`, nor where it is alone."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._store: Any = None  # torch gives its stores no public type
        self._rank, self._size = 0, 1

    def begin(self) -> None:
        """Count from now on. Not collective."""
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        if self._size == 1:
            return
        # A connection of its own: one in which the program waits would hold up the count.
        self._store = dist.group.WORLD.get_group_store().clone()  # type: ignore[union-attr]
        threading.Thread(target=self._count, name="moe_train: signs of life", daemon=True).start()

    def end(self) -> None:
        """Count no more, and be missed by nobody."""
        self._over.set()
        store = self._store
        if store is not None:
            with suppress(RuntimeError, TimeoutError):
                answer_of(lambda: store.set(_KEY.format(self._rank), _ENDED))

    def silent(self) -> str:
        """Say which ranks do not count though none of them has ended by itself; takes seconds.

        Returns:
            "" if all count, or if the store is gone, for then nobody can know.
        """
        store = self._store
        if store is None:
            return ""
        try:
            before = answer_of(lambda: self._read(store))
            time.sleep(_SILENT_S)
            after = answer_of(lambda: self._read(store))
        except TimeoutError as error:
            by = "the launcher" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") else "rank 0"
            return f"{error}: {by}, which holds it, is stopped or not to be reached"
        except RuntimeError:
            return ""
        still = [rank for rank, count in after.items() if count == before[rank] != _ENDED]
        names = f"{'ranks' if still[1:] else 'rank'} {', '.join(map(str, still))}"
        said = f"no sign of life from {names} for {_SILENT_S:g} s: stopped, killed or out of reach"
        return said if still else ""

    def _read(self, store: Any) -> dict[int, str]:
        """What each other rank has counted; nothing for one that has not begun."""
        keys = {r: _KEY.format(r) for r in range(self._size) if r != self._rank}
        return {r: store.get(k).decode() if store.check([k]) else "" for r, k in keys.items()}

    def _count(self) -> None:
        store, count = self._store, 0
        with suppress(RuntimeError):  # the store is gone, and the job with it
            while store is not None and not self._over.is_set():
                store.set(_KEY.format(self._rank), str(count))
                count += 1
                self._over.wait(_PERIOD_S)
