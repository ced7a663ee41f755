"""The saver processes of all ranks meet before each snapshot is used, in a gloo group of their own.

They meet through a store that the first rank's trainer hosts. For each snapshot there is one
outcome, written once: `go` when all have arrived, or the failure of the first rank that said that
it cannot come. So all ranks take a snapshot or none does. Saves run over the last gloo group where
every saver still has it, else over a new one; a saver that was started anew joins at the next
snapshot. No trainer takes part, but one whose saver dies between the two says so, since a group
that is being formed waits for every member until its limit.

    rendezvous = SaverRendezvous(store, rank=0, size=2, timeout_s=60)
    rendezvous.enter(1, note={})
    ...  # take the snapshot in: from here on all do
    rendezvous.form(1)
    ...  # save over the default group
    rendezvous.leave()  # after an error: the next rendezvous makes a new group
"""

import json
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from unified_ckpt._torch_private import PrefixStore, Store, TCPStore, set_default_timeout
from unified_ckpt.errors import SaveError, SavePeerError

_PREFIX = "unified-ckpt-savers"
_KEPT_OUTCOMES = 64  # far more than snapshots can be under way
_FIRST_PAUSE_S = 0.001  # between two looks at the store
_LONGEST_PAUSE_S = 0.05
# For connections between savers that were all there a moment ago, and more for each of them.
_FORM_S, _FORM_EACH_S = 15.0, 0.05


def host_store(*, timeout_s: float) -> TCPStore:
    """Open the store on a free port of this machine; `port` tells which."""
    limit = timedelta(seconds=timeout_s)
    return TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False, timeout=limit)


def connect_store(host: str, port: int, *, timeout_s: float) -> TCPStore:
    """Connect to the store that `host_store` opened."""
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))


def post_failure(store: Store, number: int, text: str) -> None:
    """Tell all savers that a rank cannot take part in a snapshot.

    Where they have agreed on it already they take it in, and only the save fails.
    """
    _post(store, number, {"error": text})
    store.set(_lost(number), text)


def _post(store: Store, number: int, outcome: Mapping[str, Any]) -> dict[str, Any]:
    """Write the outcome if there is none yet; return the one that holds."""
    held = store.compare_set(f"{_PREFIX}/{number}/outcome", "", json.dumps(outcome))
    found: dict[str, Any] = json.loads(bytes(held))
    return found


class SaverRendezvous:
    """One saver's part in the rendezvous; a single rank meets nobody.

    Args:
        store: connected to the first rank's trainer; None for a single rank.
        rank: of this saver, its trainer's rank in the trainer's group.
        size: number of savers.
        timeout_s: bound on each wait for the others.
    """

    def __init__(self, store: Store | None, *, rank: int, size: int, timeout_s: float) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout_s = timeout_s
        self._group = self._agreed = -1  # the numbers of the saves whose groups are open, and asked
        self._past: list[int] = []  # snapshots that the store still knows, on the first rank

    @property
    def group(self) -> int:
        """A number of the gloo group that is open; another one has another. -1 for none."""
        return self._group

    def enter(self, number: int, *, note: Mapping[str, Any]) -> None:
        """Wait for all savers to come to a snapshot; collective over the savers.

        Args:
            number: of the snapshot, the same on all ranks.
            note: JSON types that must be equal on all ranks.
        """
        if self._store is None:
            return
        try:
            mine = {"group": self._group, "note": dict(note)}
            self._store.set(_here(number, self._rank), json.dumps(mine))
            outcome = self._decide(number) if self._rank == 0 else self._await(number)
        except (RuntimeError, ValueError) as error:
            raise self._unmet(number, error) from error
        if outcome["error"]:
            raise SaveError(outcome["error"])
        self._agreed = outcome["group"]

    def form(self, number: int) -> None:
        """Make the default group the one that was agreed on; collective over the savers.

        Args:
            number: of the snapshot that all have entered.

        Raises:
            SavePeerError: a saver has died meanwhile.
        """
        if self._store is None or self._agreed == self._group:
            return
        self.leave()
        try:
            self._store.set(_ready(number, self._rank), "")
            for rank in range(self._size):
                self._wait(number, _ready(number, rank), _lost(number))
            form_s = _FORM_S + _FORM_EACH_S * self._size
            if self._has(_lost(number)):
                raise SavePeerError(self._read(_lost(number)).decode())
            dist.init_process_group(
                "gloo",
                store=PrefixStore(f"{_PREFIX}/group-{number}", self._store),
                rank=self._rank,
                world_size=self._size,
                timeout=timedelta(seconds=min(self._timeout_s, form_s)),
            )
            set_default_timeout(timedelta(seconds=self._timeout_s))
        except (RuntimeError, ValueError) as error:
            raise self._unmet(number, error) from error
        self._group = number

    def _unmet(self, number: int, error: Exception) -> SavePeerError:
        return SavePeerError(
            f"rank {self._rank}'s saver process could not meet the others for snapshot "
            f"{number}: {error}"
        )

    def agreed(self, number: int) -> bool:
        """Whether the outcome about a snapshot, which must be there, was to use it."""
        if self._store is None:
            return True
        return not _post(self._store, number, {"error": "its saver process died"})["error"]

    def leave(self) -> None:
        """Give up the group; the next rendezvous that needs one makes a new one."""
        if dist.is_initialized():
            dist.destroy_process_group()
        self._group = -1

    def _decide(self, number: int) -> dict[str, Any]:
        """The first rank reads what all have and writes the outcome."""
        for rank in range(self._size):
            self._wait(number, _here(number, rank), f"{_PREFIX}/{number}/outcome")
        if self._has(f"{_PREFIX}/{number}/outcome"):
            return self._post(number, {"error": ""})
        here = [json.loads(self._read(_here(number, rank))) for rank in range(self._size)]
        for rank, other in enumerate(here):
            if other["note"] != here[0]["note"]:
                text = (
                    f"rank 0's saver process has {here[0]['note']}, but rank {rank}'s has "
                    f"{other['note']}; all ranks must make the same calls"
                )
                return self._post(number, {"error": text})
        groups = {other["group"] for other in here}
        group = groups.pop() if groups != {-1} and len(groups) == 1 else number
        outcome = self._post(number, {"error": "", "group": group})
        self._forget(number)
        return outcome

    def _await(self, number: int) -> dict[str, Any]:
        self._wait(number, f"{_PREFIX}/{number}/outcome", _lost(number))
        return self._post(number, {"error": "no outcome"})

    def _wait(self, number: int, key: str, other: str) -> None:
        """Wait for one of two keys; write that the time is over, if it is."""
        deadline, pause_s = time.monotonic() + self._timeout_s, _FIRST_PAUSE_S
        while not (self._has(key) or self._has(other)):
            if time.monotonic() > deadline:
                sign = _ready if self._agreed == number else _here
                absent = [r for r in range(self._size) if not self._has(sign(number, r))]
                text = (
                    f"the saver processes of ranks {absent or [0]} did not come to snapshot "
                    f"{number} within {self._timeout_s:g} s; rank {self._rank}'s waited for them"
                )
                if self._store is not None:
                    post_failure(self._store, number, text)
                return
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _forget(self, number: int) -> None:
        """Remove from the store what nobody asks for any more."""
        self._past.append(number)
        if self._store is None or len(self._past) <= _KEPT_OUTCOMES:
            return
        old = self._past.pop(0)
        each = [key for r in range(self._size) for key in (_here(old, r), _ready(old, r))]
        for key in (f"{_PREFIX}/{old}/outcome", _lost(old), *each):
            self._store.delete_key(key)

    def _post(self, number: int, outcome: Mapping[str, Any]) -> dict[str, Any]:
        return {} if self._store is None else _post(self._store, number, outcome)

    def _read(self, key: str) -> bytes:
        return b"" if self._store is None else bytes(self._store.get(key))

    def _has(self, key: str) -> bool:
        return self._store is not None and bool(self._store.check([key]))


def _here(number: int, rank: int) -> str:
    return f"{_PREFIX}/{number}/here/{rank}"


def _ready(number: int, rank: int) -> str:
    return f"{_PREFIX}/{number}/ready/{rank}"


def _lost(number: int) -> str:
    return f"{_PREFIX}/{number}/lost"
