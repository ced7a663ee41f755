"""Which ranks of a job still run: a thread of each counts up an entry of the job's store.

A rank that is stopped counts no further. Three ranks look at all counts, and write down who has
stood still for half of the limit by which ranks are given up; whoever loses a rank reads what they
wrote, so that it can name a rank that others waited for. Half the limit is long: the thread needs
the interpreter, which one long call may keep from it while the rank lives.

What this costs the store does not grow with the number of ranks: at most 200 counts a second, and
five requests of a rank that has lost another one.

    alive = SignsOfLife()
    alive.begin(limit_s=120.0)      # when there are process groups
    alive.silent()                  # "no sign of life from rank 3 for 60 s: stopped, killed, ..."
    alive.end()
"""

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar, final

import torch.distributed as dist

T = TypeVar("T")
_COUNT, _FOUND = "moe_train/alive/{}", "moe_train/silent/{}"
_ENDED = b"ended"
_LEAST_PERIOD_S, _COUNTS_PER_S = 0.5, 200
_LEAST_LOOKS = 3  # at a count that stands still: one that is late is not silent
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
class Member:
    """One rank of those that count in a store, without the thread that lets it count.

    Args:
        store: of all ranks; torch gives its stores no public type.
        rank: this one.
        size: how many ranks count.
        limit_s: after how long ranks of this job are given up.

    Attributes:
        period_s: between two counts.
        silent_s: how long a count has to stand still.
    """

    def __init__(self, store: Any, *, rank: int, size: int, limit_s: float) -> None:
        self._store, self._rank, self._size = store, rank, size
        self.period_s = max(_LEAST_PERIOD_S, size / _COUNTS_PER_S)
        self.silent_s = max(limit_s / 2, _LEAST_LOOKS * self.period_s)
        self._counted, self._has_ended = 0, threading.Event()
        self._counting = threading.Lock()  # no count is written over the end
        self._have_begun = False
        self._counts: list[bytes] = [b""] * size
        self._changed_s, self._looks = [0.0] * size, [0] * size
        self._found: dict[int, str] = {}

    def count(self, now_s: float) -> None:
        """Count one further; on some ranks also look at the others.

        Raises:
            RuntimeError: the store is gone, and the job with it.
        """
        with self._counting:
            if self._has_ended.is_set():
                return
            self._store.set(_COUNT.format(self._rank), str(self._counted))
        self._counted += 1
        if self._rank in self._observers:
            self._look(now_s)

    def end(self) -> None:
        """Count no more, and be missed by nobody."""
        with self._counting:
            self._has_ended.set()
            self._store.set(_COUNT.format(self._rank), _ENDED.decode())

    def silent(self) -> list[int]:
        """Return the ranks that have been found silent and have not counted since.

        Raises:
            RuntimeError: the store is gone.
        """
        found: dict[int, bytes] = {}
        keys = [_FOUND.format(rank) for rank in self._observers]
        said = [key for key in keys if self._store.check([key])]
        for text in self._store.multi_get(said) if said else ():
            found |= {int(rank): count.encode() for rank, count in json.loads(text).items()}
        found.pop(self._rank, None)
        if not found:
            return []
        counts = self._store.multi_get([_COUNT.format(rank) for rank in found])
        return sorted(rank for rank, now in zip(found, counts, strict=True) if now == found[rank])

    @property
    def _observers(self) -> Sequence[int]:
        """Ranks of different machines, where there are some: one of these may be the silent one."""
        return sorted({0, self._size // 2, self._size - 1})

    def _look(self, now_s: float) -> None:
        keys = [_COUNT.format(rank) for rank in range(self._size)]
        self._have_begun = self._have_begun or self._store.check(keys)
        if not self._have_begun:
            return
        found = {}
        for rank, count in enumerate(self._store.multi_get(keys)):
            if count != self._counts[rank]:
                self._counts[rank], self._changed_s[rank], self._looks[rank] = count, now_s, 0
            self._looks[rank] += 1
            stands = now_s - self._changed_s[rank] >= self.silent_s
            if count != _ENDED and stands and self._looks[rank] > _LEAST_LOOKS:
                found[rank] = count.decode()
        if found != self._found:
            self._found = found
            self._store.set(_FOUND.format(self._rank), json.dumps(found))


@final
class SignsOfLife:
    """Those of one job on this rank; none before `begin`, nor where it is alone."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._member: Member | None = None

    def begin(self, *, limit_s: float) -> None:
        """Count from now on. Not collective.

        Args:
            limit_s: after how long ranks of this job are given up.
        """
        rank, size = dist.get_rank(), dist.get_world_size()
        if size == 1:
            return
        # A connection of its own: one in which the program waits would hold up the count.
        store = dist.group.WORLD.get_group_store().clone()  # type: ignore[union-attr]
        member = Member(store, rank=rank, size=size, limit_s=limit_s)
        with suppress(RuntimeError, TimeoutError):
            answer_of(lambda: member.count(time.monotonic()))  # who stops from now on is missed
        self._member = member
        threading.Thread(target=self._count, name="moe_train: signs of life", daemon=True).start()

    def end(self) -> None:
        """Count no more, and be missed by nobody."""
        self._over.set()
        if self._member is not None:
            with suppress(RuntimeError, TimeoutError):
                answer_of(self._member.end)

    def silent(self) -> str:
        """Say which ranks do not count though none of them has ended by itself.

        Returns:
            "" if all count, or if the store is gone, for then nobody can know.
        """
        if self._member is None:
            return ""
        try:
            still = answer_of(self._member.silent)
        except TimeoutError as error:
            by = "the launcher" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") else "rank 0"
            return f"{error}: {by}, which holds it, is stopped or not to be reached"
        except RuntimeError:
            return ""
        names = f"{'ranks' if still[1:] else 'rank'} {', '.join(map(str, still))}"
        return (
            f"no sign of life from {names} for {self._member.silent_s:g} s: stopped, killed, out "
            "of reach or within one call of the interpreter"
            if still
            else ""
        )

    def _count(self) -> None:
        member = self._member
        with suppress(RuntimeError):  # the store is gone, and the job with it
            while member is not None and not self._over.is_set():
                member.count(time.monotonic())
                self._over.wait(member.period_s)
