"""The ranks' processes and their one referee: sockets, waits, and who is gone.

The first rank that asks, or one that is named, holds the referee; its place stands in the store.
What never ends is looked for when all is quiet, so that a rank is told within seconds.

    exchange = join(store, rank)
    pending = exchange.post(parts, comm=comm, lane="0-1", where="a.py:3", targets=[[x]])
    pending.wait(limit_s=None)
"""

import atexit
import contextlib
import itertools
import os
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from devicetest.nccl.referee import Comm, Item, Part, Referee
from devicetest.nccl.verdict import find_stuck

_KEY = "devicetest/nccl"
_QUIET_S = 0.3
# A host that has waited for so long without another call is taken not to go on by other threads.
_PATIENCE_S = 2.0
_LEAVING_S = 20.0


class NcclRuleError(RuntimeError):
    """What NCCL would refuse, or where it would hang; the message says who waits for whom."""


class Pending:
    """An operation that has been queued."""

    def __init__(self, exchange: "Exchange", number: int, label: str) -> None:
        self._exchange, self.number, self.label = exchange, number, label
        self.ended = threading.Event()
        self.error = ""
        self.is_aborted = False

    def wait(self, limit_s: float | None) -> None:
        """Wait for the end.

        Raises:
            NcclRuleError: it will never come, or did not within the limit.
        """
        if not self.ended.is_set():
            self._exchange.tell("wait", self.number)
            ended = self.ended.wait(limit_s)
            self._exchange.tell("go on", self.number)
            if not ended:
                raise NcclRuleError(f"timed out after {limit_s:.1f} s: {self.label}")
        if self.error:
            raise NcclRuleError(self.error)

    def abort(self) -> None:
        """Let who waits go on; what was to be filled is garbage."""
        self.is_aborted = True
        self.ended.set()


class Exchange:
    """One rank's way to the referee. Calls of several threads are queued one after the other."""

    def __init__(self, address: str, rank: int) -> None:
        self.rank = rank
        self._numbers = itertools.count()
        self._sending = threading.Lock()
        self._pending: dict[int, tuple[Pending, Callable[[dict[int, list[bytes]]], None]]] = {}
        self.issued: list[str] = []  # calls of this process, of all groups
        self._broken = ""
        self._is_silent = False
        self._connection: Connection = Client(address, "AF_UNIX")
        self._connection.send((rank, os.getpid()))
        threading.Thread(target=self._listen, name="nccl rules: answers", daemon=True).start()

    def post(
        self,
        parts: Sequence[Part],
        *,
        comm: Comm,
        lane: str,
        where: str,
        device: str,
        fill: Callable[[dict[int, list[bytes]]], None],
    ) -> Pending:
        """Queue an operation; `fill` gets what each of its parts brings, in another thread."""
        with self._sending:
            number = next(self._numbers) * 4096 + self.rank
            item = Item(
                number=number,
                rank=self.rank,
                comm=comm,
                lane=lane,
                parts=tuple(parts),
                where=where,
                device=device,
            )
            pending = Pending(self, number, f"rank {self.rank}: {item}")
            self._is_silent |= comm.is_silent
            self._pending[number] = (pending, fill)
            self._send(("post", item))
        if self._broken:
            self._break(self._broken)
        return pending

    def tell(self, what: str, number: int) -> None:
        """Say that the host waits for an operation, or no longer."""
        with self._sending:
            self._send((what, number))

    def _send(self, message: object) -> None:
        with contextlib.suppress(OSError):  # the thread that listens says why
            self._connection.send(message)

    def _listen(self) -> None:
        while True:
            try:
                what, value, brought = self._connection.recv()
            except (EOFError, OSError):
                if not self._is_silent:
                    self._break("the process that holds the referee of NCCL's rules has ended")
                return
            if what == "fault":
                self._break(value)
                continue
            pending, fill = self._pending.pop(value)
            if not pending.is_aborted:
                fill(brought)
                pending.ended.set()

    def _break(self, text: str) -> None:
        self._broken = text
        for number in list(self._pending):
            pending, _ = self._pending.pop(number, (None, None))
            if pending is not None:
                pending.error = text
                pending.ended.set()


class _Court:
    """The referee with its ranks, in the process of one of them."""

    def __init__(self) -> None:
        self.address = os.path.join(tempfile.mkdtemp(prefix="nccl-rules-"), "referee")
        self._referee = Referee()
        self._lock = threading.Lock()
        self._ways: dict[int, Connection] = {}
        self._processes: dict[int, int] = {}
        self._gone: set[int] = set()
        self._waits: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        self._last: dict[int, float] = defaultdict(time.monotonic)
        self._looked = True
        self._listener = Listener(self.address, "AF_UNIX")
        for work in (self._accept, self._watch):
            threading.Thread(target=work, name="nccl rules: referee", daemon=True).start()
        atexit.register(self._close)

    def _accept(self) -> None:
        while True:
            try:
                way = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._serve, args=(way,), daemon=True).start()

    def _serve(self, way: Connection) -> None:
        rank, process = way.recv()
        with self._lock:
            self._ways[rank], self._processes[rank] = way, process
        while True:
            try:
                what, value = way.recv()
            except (EOFError, OSError):
                break
            with self._lock:
                self._handle(rank, what, value)
        with self._lock:
            self._gone.add(rank)
            del self._ways[rank]
            self._looked = False

    def _handle(self, rank: int, what: str, value: Any) -> None:
        self._looked = False
        self._last[rank] = time.monotonic()
        if what == "wait":
            self._waits[rank][value] += 1
        elif what == "go on":
            self._waits[rank][value] -= 1
        elif not self._referee.fault:
            self._referee.post(value)
            if not self._referee.fault:
                self._send_ended()
        self._send_fault()

    def _send_ended(self) -> None:
        while self._referee.done:
            item = self._referee.done.pop()
            self._send(item.rank, ("done", item.number, item.brought))

    def _send_fault(self) -> None:
        if self._referee.fault:
            for rank in list(self._ways):
                self._send(rank, ("fault", self._referee.fault, None))

    def _send(self, rank: int, message: object) -> None:
        with contextlib.suppress(OSError, KeyError):  # a rank that is gone needs no answer
            self._ways[rank].send(message)

    def _watch(self) -> None:
        """When all is quiet, look for what never ends."""
        while True:
            time.sleep(_QUIET_S)
            with self._lock:
                now = time.monotonic()
                if self._looked or self._referee.fault:
                    continue
                if any(item.comm.is_silent for item in self._referee.items()):
                    continue
                if now - max(self._last.values(), default=now) < _QUIET_S:
                    continue
                waiting = {
                    rank: {n for n, count in waits.items() if count > 0}
                    for rank, waits in self._waits.items()
                }
                patient = {rank: now - self._last[rank] < _PATIENCE_S for rank in waiting}
                self._looked = not any(patient[rank] and held for rank, held in waiting.items())
                waiting = {rank: held for rank, held in waiting.items() if not patient[rank]}
                self._referee.fault = find_stuck(self._referee, waiting=waiting, gone=self._gone)
                self._send_fault()

    def _close(self) -> None:
        """Let ranks that still talk come to their end before this process ends."""
        until = time.monotonic() + _LEAVING_S
        own = os.getpid()
        while any(self._processes[rank] != own for rank in list(self._ways)):
            if time.monotonic() > until or self._referee.fault:
                break
            if any(item.comm.is_silent for item in self._referee.items()):
                break  # these never end
            time.sleep(0.02)
        with contextlib.suppress(OSError):
            self._listener.close()  # which removes its address
            os.rmdir(os.path.dirname(self.address))


_joined: dict[tuple[int, str, int], Exchange] = {}
_joining = threading.Lock()


def join(store: Any, rank: int, *, holder: int | None = None) -> Exchange:
    """Return this rank's exchange in the world of a store.

    Args:
        store: any store of the world; prefixes are taken off.
        rank: in the world.
        holder: the rank whose process holds the referee; None: of the first call of all.
    """
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if holder in (None, rank) and store.add(f"{_KEY}/holder", 1) == 1:
        store.set(f"{_KEY}/address", _Court().address)
    address = store.get(f"{_KEY}/address").decode()
    with _joining:
        key = (os.getpid(), address, rank)
        if key not in _joined:
            _joined[key] = Exchange(address, rank)
        return _joined[key]
