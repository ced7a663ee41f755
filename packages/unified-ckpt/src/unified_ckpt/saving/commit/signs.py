"""Who of a group lives: found by a roll call in the store, when a wait has failed.

A broken connection ends the wait of one rank and leaves another one waiting for the first. So
whoever waits for long asks once a second whether there is a call, and answers it; of those whose
wait has failed one makes the call, and writes down who has not answered and how far they had come,
for all others to read. What this costs the store does not grow with the number of ranks, but for
the one answer that each gives. Invariant: a rank that waits, or that looks who is silent, or that
has gone on to what comes next, is never found to be silent; no clock of another machine is read.

    signs = Signs(store, ranks=[0, 1, 2], rank=0, about="save('run/checkpoint-10')")
    with signs.marked():  # others can tell that this rank has come, and then that it has gone on
        signs.wait(work, limit_s=600.0)  # RuntimeError: it failed, or a peer knows why
    signs.find_silent()  # Silent(absent=[], arrived=[2])
"""

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property

import torch.distributed as dist

from unified_ckpt._torch_private import Store

_PAUSES_S = (5e-5, 1e-3)
_FIRST_S, _LISTEN_S = 0.25, 1.0  # of a wait: when it first asks for calls, and how often then
# Of a call: how long nobody new must have answered; how long it lasts at least, which is longer
# than a wait that was there before takes to hear of it; and at most; when the next rank makes it.
_QUIET_S, _LEAST_S, _MOST_S, _NEXT_S = 3.0, 1.0, 30.0, 40.0
_LOOK_S, _MOST_TURNS = 0.25, 3
_AT_ONCE = 64  # marks that are asked for in one request
_HERE, _GONE = "here", "gone"
_Mark = tuple[int, int, str]  # a rank, the number of the exchange that it came to last, its state


@dataclass(frozen=True, slots=True, kw_only=True)
class Silent:
    """Ranks of a group without a sign of life: those that did not arrive, and those that had."""

    absent: list[int]
    arrived: list[int]


class Signs:
    """The signs of one rank of a group; without a store it only waits.

    Args:
        store: of all ranks; one whose operations fail says nothing.
        ranks: of the group, in the world.
        rank: of this process, in the group.
        about: what is waited for, the same on all ranks.

    Attributes:
        number: of the exchange that this rank is in, counted by the ranks of the group as long as
            the store lives. After an error a rank may be behind until it sets it to the largest.
    """

    def __init__(self, store: Store | None, *, ranks: list[int], rank: int, about: str) -> None:
        self._store, self._ranks, self._rank, self._about = store, ranks, rank, about
        self._others = [other for other in range(len(ranks)) if other != rank]
        self._before: int | None = None  # the calls up to this one are of other waits
        self._answered = 0
        self._is_marked = False
        self.number = 0

    @contextmanager
    def marked(self) -> Iterator[None]:
        """Write down that this rank is here, and that it has gone on when no error is raised.

        Raises:
            RuntimeError: the store is gone as this rank arrives.
        """
        if self._store is not None and self.number == 0 and self._store.check([self._own_key]):
            self.number = json.loads(self._store.get(self._own_key))[0]
        self.number += 1
        self._mark(_HERE)
        self._is_marked = True
        yield
        self._is_marked = False
        with suppress(RuntimeError):  # all have met, so whoever hosts the store may end
            self._mark(_GONE)

    def wait(self, work: dist.Work, limit_s: float) -> None:
        """Wait for a collective of the group, and answer calls.

        Raises:
            RuntimeError: it failed, did not end in time, or others have found who is silent.
        """
        begin_s = time.monotonic()
        until_s, next_s = begin_s + limit_s, begin_s + _FIRST_S
        pause_s, longest_s = _PAUSES_S
        while not work.is_completed():
            now_s = time.monotonic()
            if now_s >= until_s:
                work.wait(timedelta(milliseconds=1))  # raises, and aborts what a device waits for
                break
            if now_s >= next_s:
                next_s = now_s + _LISTEN_S
                if self._is_told():
                    raise RuntimeError("another rank has found out that it comes to no end")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)
        work.wait()

    def find_silent(self) -> Silent:
        """Return who of the group gives no sign, as the rank that made the call has found it.

        Raises:
            RuntimeError: the store is gone.
        """
        if self._store is None:
            return Silent(absent=[], arrived=[])
        marks = self._listen(self._store)
        if marks is None:
            marks = self._look(self._store)
        if not self._is_marked:
            return Silent(absent=[rank for rank, *_ in marks], arrived=[])
        return Silent(
            absent=[rank for rank, number, _ in marks if number < self.number],
            arrived=[rank for rank, *mark in marks if mark == [self.number, _HERE]],
        )

    def _is_told(self) -> bool:
        try:
            return self._store is not None and self._listen(self._store) is not None
        except RuntimeError:
            return False

    def _listen(self, store: Store) -> list[_Mark] | None:
        """Answer the calls since this rank listens; return what the last one has found of others.

        One request where there was no call, three where there is one.
        """
        number = store.add(f"{self._keys}/calls", 0)
        if self._before is None:  # a call that has ended by now was there before the wait was
            has_ended = number > 0 and store.check([self._said_key(number)])
            self._before = number if has_ended else max(number - 1, 0)
            self._answered = self._before
        for call in range(self._answered + 1, number + 1):
            self._answer(store, call)
        if number <= self._before or not store.check([self._said_key(number)]):
            return None
        said = json.loads(store.get(self._said_key(number)))
        if said["about"] != self._about or self._rank in (other for other, *_ in said["silent"]):
            self._before = number
            return None
        return [(rank, at, state) for rank, at, state in said["silent"]]

    def _look(self, store: Store) -> list[_Mark]:
        """Make a call when it is this rank's turn; until then answer, and wait for what is said.

        The first that asks for a turn has it. Should it die, the next one has it, and so on.
        """
        number = store.add(f"{self._keys}/calls", 0)
        if number == self._before:
            number += 1
        turn = min(store.add(f"{self._keys}/{number}/turns", 1) - 1, _MOST_TURNS)
        turn_s = time.monotonic() + _NEXT_S * turn
        while True:
            if time.monotonic() >= turn_s:
                if store.add(f"{self._keys}/calls", 0) < number:
                    store.add(f"{self._keys}/calls", 1)
                self._call(store, number)
            marks = self._listen(store)
            if marks is not None:
                return marks
            if self._before is not None and number <= self._before:  # it was of another wait
                return self._look(store)
            time.sleep(_LOOK_S)

    def _call(self, store: Store, number: int) -> None:
        """Collect the answers to a call until no more come, and say who has given none."""
        self._answer(store, number)
        begin_s = quiet_s = time.monotonic()
        answered: set[int] = set()
        while True:
            now_s = time.monotonic()
            heard = {int(rank) for rank in store.get(self._answers_key(number)).split()}
            if heard != answered:
                answered, quiet_s = heard, now_s
            is_over = now_s >= quiet_s + _QUIET_S or answered.issuperset(self._others)
            if (is_over and now_s >= begin_s + _LEAST_S) or now_s >= begin_s + _MOST_S:
                break
            time.sleep(_LOOK_S)
        silent = self._marks_of(store, [rank for rank in self._others if rank not in answered])
        said = {"about": self._about, "silent": silent}
        store.set(self._said_key(number), json.dumps(said))

    def _marks_of(self, store: Store, ranks: Sequence[int]) -> list[_Mark]:
        """Return how far ranks had come; 0 where one was never in an exchange."""
        marks: dict[int, tuple[int, str]] = {}
        for begin in range(0, len(ranks), _AT_ONCE):
            some = ranks[begin : begin + _AT_ONCE]
            if not store.check([self._mark_key(rank) for rank in some]):
                some = [rank for rank in some if store.check([self._mark_key(rank)])]
            if some:
                texts = store.multi_get([self._mark_key(rank) for rank in some])
                marks |= zip(some, map(json.loads, texts), strict=True)
        return [(rank, *marks.get(rank, (0, _HERE))) for rank in ranks]

    def _mark(self, state: str) -> None:
        if self._store is not None:
            self._store.set(self._own_key, json.dumps([self.number, state]))

    @property
    def _own_key(self) -> str:
        return self._mark_key(self._rank)

    @cached_property
    def _keys(self) -> str:
        digest = hashlib.blake2b(repr(self._ranks).encode(), digest_size=8)
        return f"unified-ckpt/{digest.hexdigest()}"

    def _answer(self, store: Store, number: int) -> None:
        store.append(self._answers_key(number), f"{self._rank} ")  # type: ignore[attr-defined]
        self._answered = max(self._answered, number)

    def _mark_key(self, rank: int) -> str:
        return f"{self._keys}/at/{rank}"

    def _answers_key(self, number: int) -> str:
        return f"{self._keys}/{number}/answers"

    def _said_key(self, number: int) -> str:
        return f"{self._keys}/{number}/said"
