"""The trainer's end of a saver process: start it, hand it snapshots, notice at once when it dies.

The process is a fresh interpreter, never a fork: the trainer has threads and perhaps CUDA. What
crosses the socket are short messages and file descriptors of shared memory, so a send never waits
for the other side. A thread of the trainer reads the answers; it runs no collectives.

    process = SaverProcess(settings, on_answer=print, on_death=print)
    process.wait_ready(timeout_s=60)
    process.send({"kind": "save", ...}, memory.fd)
    process.close(timeout_s=60)
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import unified_ckpt
from unified_ckpt._torch_private import TCPStore
from unified_ckpt.background.config import AsyncSaverConfig
from unified_ckpt.errors import CheckpointValueError, SaveError
from unified_ckpt.node import node_name
from unified_ckpt.saver_process import MAX_MESSAGE_BYTES, connect_store, host_store
from unified_ckpt.saving.commit import Agreement

_REAP_TIMEOUT_S = 10.0


def open_store(
    agreement: Agreement, config: AsyncSaverConfig
) -> tuple[TCPStore | None, dict[str, Any]]:
    """Open the store where the savers of all ranks meet, None for one rank; collective.

    Returns:
        The store, and the settings of this rank's saver process.
    """
    store = None
    with agreement.phase("open store") as phase:
        if agreement.size > 1 and agreement.rank == 0:
            store = host_store(timeout_s=config.timeout_s)
        port = 0 if store is None else store.port
        phase.payload = [node_name(), config.store_host, socket.gethostname(), port]
    node, given, host, port = phase.results[0]
    host = given or ("127.0.0.1" if all(one[0] == node for one in phase.results) else host)
    with agreement.phase("connect to store"):
        if agreement.size > 1 and store is None:
            # Peers wait for the outcome, and torch's client ends up to twice as late as it is told.
            timeout_s = config.start_timeout_s / 8
            store = connect_store(host, port, timeout_s=timeout_s)
    return store, {
        "rank": agreement.rank,
        "size": agreement.size,
        "store": [host, port] if agreement.size > 1 else None,
        **config.to_json(),
    }


class SaverProcess:
    """One running saver process.

    Args:
        settings: JSON types, handed to `saver_process.main`.
        on_answer: called with every answer, on a thread of this process.
        on_death: called once with the cause, on that thread, if the process ends unasked.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        *,
        on_answer: Callable[[dict[str, Any]], None],
        on_death: Callable[[str], None],
    ) -> None:
        self._on_answer = on_answer
        self._on_death = on_death
        self._ready = threading.Event()
        self._ended = threading.Event()
        self._closing = False
        self._cause = ""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            given = {**settings, "socket_fd": theirs.fileno(), "parent_pid": os.getpid()}
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "unified_ckpt.saver_process.main", json.dumps(given)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": _import_path()},
            )
        name = "unified-ckpt-saver-answers"
        self._listener = threading.Thread(target=self._listen, name=name, daemon=True)
        self._listener.start()

    @property
    def pid(self) -> int:
        """The process id of the saver."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether the process is known to have ended."""
        return self._ended.is_set()

    def wait_ready(self, *, timeout_s: float) -> None:
        """Wait until the process has started."""
        if not self._ready.wait(timeout_s):
            raise SaveError(f"the saver process (pid {self.pid}) did not start in {timeout_s:g} s")
        if self.ended:
            raise SaveError(f"the saver process could not start: {self._cause}")

    def send(self, message: Mapping[str, Any], *fds: int) -> None:
        """Hand over a short message with descriptors; never waits.

        Raises:
            OSError: the process has ended, or does not read.
        """
        raw = json.dumps(message).encode()
        if len(raw) > MAX_MESSAGE_BYTES:
            raise CheckpointValueError(f"message of {len(raw)} bytes; at most {MAX_MESSAGE_BYTES}")
        socket.send_fds(self._socket, [raw], list(fds), socket.MSG_DONTWAIT)

    def close(self, *, timeout_s: float) -> None:
        """Ask the process to end after what it does now; kill it when the time is over."""
        self._closing = True
        with contextlib.suppress(OSError):  # it has ended by itself
            self.send({"kind": "close"})
        if not self._ended.wait(timeout_s):
            self._process.kill()
        self._listener.join(_REAP_TIMEOUT_S)
        self._socket.close()

    def _listen(self) -> None:
        while True:
            try:
                raw = self._socket.recv(2 * MAX_MESSAGE_BYTES)
            except OSError:
                raw = b""
            if not raw:
                break
            answer = json.loads(raw)
            if answer["kind"] == "ready":
                self._ready.set()
            else:
                self._on_answer(answer)
        self._cause = self._reap()
        self._ended.set()
        self._ready.set()
        if not self._closing:
            self._on_death(self._cause)

    def _reap(self) -> str:
        """Collect the ended process and say how it ended."""
        try:
            code = self._process.wait(_REAP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        if code >= 0:
            return f"pid {self.pid} ended with exit code {code}"
        name = signal.Signals(-code).name
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return f"pid {self.pid} was ended by {name}{hint}"


def _import_path() -> str:
    """What this process can import, the new one can: this package first of all."""
    here = str(Path(str(unified_ckpt.__file__)).parents[1])
    entries = [here, *(entry or os.getcwd() for entry in sys.path)]
    return os.pathsep.join(dict.fromkeys(entries))
