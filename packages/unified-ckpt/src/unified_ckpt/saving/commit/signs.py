"""Who of a group lives: signs in the store, given by whoever waits for the others.

A broken connection ends the wait of one rank and leaves another one waiting for the first. So a
rank that waits for long gives a sign each second; one whose wait has failed looks for some seconds
who gives none, writes that down, and whoever still waits reads it. Invariant: a rank that waits, or
that looks who is silent, is never found to be silent.

    signs = Signs(store, ranks=[0, 1, 2], rank=0, about="save('run/checkpoint-10') write")
    signs.wait(work, limit_s=600.0)              # RuntimeError: it failed, or a peer knows why
    signs.find_silent()                          # [2]
"""

import json
import time
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from unified_ckpt._torch_private import Store

_SIGN_S = 1.0
_LOOK_S = 3.0
_PAUSES_S = (5e-5, 1e-3)
_FRESH_S = 10.0  # what was found earlier is of another failure


class Signs:
    """The signs of one rank of a group; without a store it only waits.

    Args:
        store: of all ranks; one whose operations fail says nothing.
        ranks: of the group, in the world.
        rank: of this process, in the group.
        about: what is waited for, the same on all ranks.
    """

    def __init__(self, store: Store | None, *, ranks: list[int], rank: int, about: str) -> None:
        self._store, self._rank = store, rank
        self._others = [other for other in range(len(ranks)) if other != rank]
        self._keys = f"unified-ckpt/{'-'.join(map(str, ranks))}"
        self._found_key = f"{self._keys}/silent/{about}"
        self._count = 0

    def wait(self, work: dist.Work, limit_s: float) -> None:
        """Wait for a collective of the group, with signs.

        Raises:
            RuntimeError: it failed, did not end in time, or others have found who is silent.
        """
        until = time.monotonic() + limit_s
        next_s, (pause_s, longest_s) = time.monotonic() + _SIGN_S, _PAUSES_S
        while not work.is_completed():
            now = time.monotonic()
            if now >= until:
                work.wait(timedelta(milliseconds=1))  # raises, and aborts what a device waits for
                break
            if now >= next_s:
                next_s = now + _SIGN_S
                self._give()
                if self._known() is not None:
                    raise RuntimeError("another rank has found out that it comes to no end")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)
        work.wait()

    def find_silent(self) -> list[int]:
        """Return who of the group gives no sign, as the first rank that looked has found it.

        Raises:
            RuntimeError: the store is gone.
        """
        before, silent = self._read(), set(self._others)
        until = time.monotonic() + _LOOK_S
        while silent and time.monotonic() < until:
            self._give()
            known = self._known()
            if known is not None:
                return known
            time.sleep(_SIGN_S / 4)
            now = self._read()
            silent = {other for other in silent if now[other] == before[other]}
        if self._store is not None and silent:
            found = {"silent": sorted(silent), "said_s": time.time()}
            self._store.set(self._found_key, json.dumps(found))
        return sorted(silent)

    def _give(self) -> None:
        self._count += 1
        if self._store is not None:
            with suppress(RuntimeError):
                self._store.set(f"{self._keys}/sign/{self._rank}", f"{time.time()} {self._count}")

    def _read(self) -> dict[int, bytes]:
        return {other: self._get(f"{self._keys}/sign/{other}") for other in self._others}

    def _get(self, key: str) -> bytes:
        if self._store is None or not self._store.check([key]):
            return b""
        found: bytes = self._store.get(key)
        return found

    def _known(self) -> list[int] | None:
        """What another rank has found a moment ago; None if nothing, or if it was this rank."""
        try:
            found = self._get(self._found_key)
        except RuntimeError:
            return None
        said = json.loads(found or b"{}")
        is_fresh = abs(time.time() - said.get("said_s", 0.0)) < _FRESH_S
        if not is_fresh or self._rank in said["silent"]:
            return None
        silent: list[int] = said["silent"]
        return silent
