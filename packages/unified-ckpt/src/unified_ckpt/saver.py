"""The queue of snapshots between a trainer and its saver process: bounded, loud, restarted.

Who saves reserves a ticket, fills the ticket's staging memory, and submits it; the saver process
writes it in the background. Nothing here is collective but the constructor, and no thread of the
trainer ever uses the trainer's process groups.

An error of the background shows in the ticket's `upload_completion`, and once more at the next
`reserve` if nobody has looked at it there. A saver that died is started again by that `reserve`.

    with AsyncSaver() as saver:  # collective
        saver.prepare(state)  # staging memory is there before the first save
        async_save(state, checkpoint_id="run/checkpoint-10", saver=saver)
"""

import atexit
import contextlib
import json
import os
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import wait as wait_futures
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from unified_ckpt._torch_private import TCPStore
from unified_ckpt.agreement import Agreement
from unified_ckpt.checkpoint import load_files
from unified_ckpt.ema import EMA_FILE, EMA_PART, EmaConfig, EmaMemory
from unified_ckpt.errors import SaveArgumentError, SaveError, SavePeerError
from unified_ckpt.loading import load
from unified_ckpt.memory import byte_view
from unified_ckpt.offloader import Offloader
from unified_ckpt.options import SaveOptions
from unified_ckpt.saver_config import AsyncSaverConfig
from unified_ckpt.saver_group import connect_store, host_store, post_failure
from unified_ckpt.saver_process import SaverProcess
from unified_ckpt.saving import SaveReport
from unified_ckpt.shard import Shard
from unified_ckpt.snapshot_request import EncodedRequest, SnapshotRequest, encode_request
from unified_ckpt.staging import StagingBuffer, StagingLayout, StagingPool, tensors_of
from unified_ckpt.state import StateDict
from unified_ckpt.tickets import Ticket, TicketBook, UploadFuture

_COPY_CHUNKS = 16  # shared by the calling thread and one more
_TAIL_BYTES = 1 << 20  # room beside the tensors for files of the usual size


class AsyncSaver:
    """A saver process of this rank, with its staging memory; collective over `group` to make.

    Args:
        group: the ranks that save together, None for all; without process groups this one alone.
        config: bounds and sizes.

    Raises:
        SaveError: some rank could not start its saver process. On every rank.
    """

    def __init__(
        self, *, group: dist.ProcessGroup | None = None, config: AsyncSaverConfig | None = None
    ) -> None:
        self.config = config or AsyncSaverConfig()
        agreement = Agreement(group, timeout_s=self.config.start_timeout_s, subject="AsyncSaver")
        self._rank = agreement.rank
        self._who = f"rank {agreement.global_rank_here}"
        self._number = 0
        self._book = TicketBook()
        self._layout = StagingLayout((), (), 0)
        self._layout_json = b""
        self._pool = StagingPool(self.config.num_buffers)
        self.offloader = Offloader(_COPY_CHUNKS)  # of saves that copy all at once
        self._ema: EmaMemory | None = None
        self._closed = False
        self._store: TCPStore | None = None
        self._settings = self._meet(agreement)
        with agreement.phase("start saver"):
            self._process = self._start()
            self._process.wait_ready(timeout_s=self.config.start_timeout_s)
        atexit.register(self.close)

    @property
    def pid(self) -> int:
        """Process id of the saver process."""
        return self._process.pid

    @property
    def saver_ended(self) -> bool:
        """Whether the saver process has died; the next save says so and starts another."""
        return self._process.ended

    @property
    def ema_updates(self) -> int:
        """Snapshots that the moving average has taken in; 0 without one."""
        return 0 if self._ema is None else self._ema.num_updates

    def prepare(
        self, state_dict: StateDict, *, options: SaveOptions | None = None
    ) -> StagingLayout:
        """Allocate and touch memory for such a state, so that the first save waits for nothing.

        Raises:
            SaveError: there is not enough memory; the message gives the sizes.
        """
        request, parts = SnapshotRequest.of(state_dict, checkpoint_id=None, options=options)
        layout = self._layout_of(parts)
        self.offloader.plan(tensors_of(parts), layout)
        encoded = encode_request(request, self._layout_json, base=layout.num_bytes)
        self._pool.prepare(encoded.num_bytes + _TAIL_BYTES)
        return layout

    def load_ema(self, checkpoint_id: Path | str) -> None:
        """Continue the moving average of a checkpoint, of any layout; after `prepare`.

        Without it the average begins with the first snapshot.

        Raises:
            SaveArgumentError: no average is configured, or `prepare` has not been called.
            LoadError: the checkpoint holds no such average.
        """
        if self._ema is None:
            raise SaveArgumentError("load_ema needs AsyncSaverConfig(ema=...) and prepare() first")
        self.wait()
        load({EMA_PART: self._ema.shards()}, checkpoint_id=checkpoint_id)
        self._ema.restore(load_files(checkpoint_id, EMA_FILE))

    def reserve(
        self, state_dict: StateDict, **request: Any
    ) -> tuple[Ticket, Sequence[torch.Tensor]]:
        """Take a staging buffer for a snapshot; every rank does, in the same order of snapshots.

        Args:
            state_dict: what will be copied.
            request: as `SnapshotRequest.of` takes them.

        Returns:
            The ticket, and the tensors to copy into its views.

        Raises:
            TypeError: the state or the files hold something that cannot be saved.
            SaveError: an earlier save failed unseen, the saver process had died (it is started
                again), or no buffer became free in time.
        """
        self._number += 1
        try:
            self._check_open()
            self._restart_if_dead()
            self._raise_unseen()
            snapshot, parts = SnapshotRequest.of(state_dict, **request)
            layout = self._layout_of(parts)
            encoded = encode_request(snapshot, self._layout_json, base=layout.num_bytes)
            buffer = self._pool.acquire(
                encoded.num_bytes, timeout_s=self.config.backpressure_timeout_s
            )
        except (SaveError, OSError, TypeError, ValueError) as error:
            self._tell_peers(self._number, str(error))
            raise
        _write(encoded, buffer)
        ticket = Ticket(
            number=self._number,
            layout=layout,
            buffer=buffer,
            head=encoded.head,
            upload_completion=UploadFuture(),
        )
        self._book.add(ticket)
        return ticket, tensors_of(parts)

    def _layout_of(self, parts: Mapping[str, Sequence[Shard]]) -> StagingLayout:
        """Return where the shards stand in a buffer; remembered while they stay alike."""
        if not self._layout.matches(parts) or not self._layout_json:
            self._layout = StagingLayout.of(parts)
            self._layout_json = json.dumps(self._layout.to_json(), separators=(",", ":")).encode()
            if any(tensor.is_cuda for tensor in tensors_of(parts)):
                self._pool.pin()
            if self.config.ema is not None and self._ema is None:
                self._ema = EmaMemory.allocate(self.config.ema, self._layout)
            elif self._ema is not None and not self._ema.fits(self._layout):
                raise SaveArgumentError(
                    f"the shards of part {self._ema.config.source!r} are not those of the moving "
                    "average; make a new AsyncSaver for another layout and call load_ema"
                )
        return self._layout

    def submit(self, ticket: Ticket) -> None:
        """Hand a filled snapshot to the saver process; an error shows in `upload_completion`.

        Snapshots reach the process in the order of their tickets, so that all ranks' savers meet
        for the same one; a ticket that is neither submitted nor abandoned holds up the later ones.
        """
        self._book.submit(ticket)
        self._send_ready()

    def abandon(self, ticket: Ticket, error: SaveError) -> None:
        """Give a snapshot up; it fails on all ranks."""
        self._fail([ticket], error)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until everything submitted is written; not collective.

        Raises:
            SaveError: a save failed, or not all ended within `timeout_s`.
        """
        running = [ticket.upload_completion for ticket in self._book.submitted()]
        limit_s = 2 * self.config.timeout_s if timeout_s is None else timeout_s
        late = wait_futures(running, timeout=limit_s).not_done
        if late:
            raise SaveError(f"{self._who}: {len(late)} saves did not end within {limit_s:g} s")
        self._raise_unseen()

    def close(self) -> None:
        """Let the saver process finish and end; not collective. Later calls do nothing.

        Raises:
            SaveError: a save failed unseen.
        """
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        try:
            self.wait()
        finally:
            self._process.close(timeout_s=self.config.start_timeout_s)
            self.offloader.close()
            self._pool.close()

    def __enter__(self) -> "AsyncSaver":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _meet(self, agreement: Agreement) -> dict[str, Any]:
        """Open the store where the savers of all ranks meet; return the process's settings."""
        with agreement.phase("open store") as phase:
            host = self.config.store_host or socket.gethostname()
            if agreement.size > 1 and agreement.rank == 0:
                self._store = host_store(timeout_s=self.config.timeout_s)
            phase.payload = [host, self._store.port if self._store is not None else 0]
        host, port = phase.results[0]
        if all(other == host for other, _ in phase.results):
            host = "127.0.0.1"
        if agreement.size > 1 and self._store is None:
            self._store = connect_store(host, port, timeout_s=self.config.timeout_s)
        tier = self.config.fast_tier
        return {
            "rank": agreement.rank,
            "size": agreement.size,
            "store": [host, port] if agreement.size > 1 else None,
            "timeout_s": self.config.timeout_s,
            "num_buffers": self.config.num_buffers,
            "orphan_grace_s": self.config.orphan_grace_s,
            "niceness": self.config.niceness,
            "fast_tier": None if tier is None else os.path.realpath(tier),
            "fast_tier_keep": self.config.fast_tier_keep,
            "start_timeout_s": self.config.start_timeout_s,
            "ema": (self.config.ema or EmaConfig()).to_json(),
        }

    def _start(self) -> SaverProcess:
        return SaverProcess(self._settings, on_answer=self._on_answer, on_death=self._on_death)

    def _restart_if_dead(self) -> None:
        if self._process.ended:
            self._process.close(timeout_s=self.config.start_timeout_s)
            self._process = self._start()
            for ticket in self._book.to_redo():
                self._send(ticket, redo=True)

    def _check_open(self) -> None:
        if self._closed:
            raise SaveArgumentError("this AsyncSaver is closed; make a new one")

    def _on_answer(self, answer: dict[str, Any]) -> None:
        redone = self._book.redone(answer["number"])
        if redone is not None:
            self._pool.release(redone.buffer)
        ticket = self._book.open_ticket(answer["number"])
        if ticket is None:
            return
        if "error" in answer:
            self._fail([ticket], _error(*answer["error"]))
            return
        report = answer["report"]
        if self._book.end(ticket):
            self._pool.release(ticket.buffer)
            ticket.upload_completion.set_result(None if report is None else _report(report))
            self._send_ready()

    def _on_death(self, cause: str) -> None:
        tickets = self._book.running()
        if tickets:
            self._fail(tickets, self._death(cause), died=True)
            return
        idle = UploadFuture()
        idle.set_exception(self._death(cause))
        self._book.note_failure(idle)

    def _death(self, cause: str) -> SaveError:
        return SaveError(
            f"{self._who}: the saver process died: {cause}; what it was writing is not saved, "
            "older checkpoints are untouched. A new one is started for the save after the next call"
        )

    def _fail(self, tickets: Sequence[Ticket], error: SaveError, *, died: bool = False) -> None:
        redo = died and self._ema is not None
        for ticket in tickets:
            if not self._book.end(ticket, redo=redo):
                continue
            if not redo:
                self._pool.release(ticket.buffer)
            self._tell_peers(ticket.number, str(error))
            self._book.note_failure(ticket.upload_completion)
            ticket.upload_completion.set_exception(error)
        self._send_ready()

    def _send_ready(self) -> None:
        """Send what is submitted, up to the first ticket that is not."""
        while (ticket := self._book.next_to_send()) is not None:
            if self._process.ended:
                self._fail([ticket], self._death("it had ended"), died=True)
                continue
            try:
                self._send(ticket, redo=False)
            except BlockingIOError as error:
                self._fail([ticket], SaveError(f"{self._who}: the saver is stuck: {error}"))
            except OSError:
                pass  # it has just ended; the listener fails all that runs

    def _send(self, ticket: Ticket, *, redo: bool) -> None:
        message = {"kind": "use", "number": ticket.number, "head": ticket.head, "redo": redo}
        average = [] if self._ema is None else [self._ema.memory.fd]
        self._process.send(message, ticket.buffer.memory.fd, *average)

    def _raise_unseen(self) -> None:
        error = self._book.take_unseen()
        if error is not None:
            raise SaveError(
                f"since the last call a save failed, or could not have: {error}"
            ) from error

    def _tell_peers(self, number: int, text: str) -> None:
        """Let the savers of other ranks fail at once instead of waiting for this one."""
        if self._store is None:
            return
        with contextlib.suppress(RuntimeError):  # the store's host is gone: its peers know already
            post_failure(self._store, number, text)


def _write(encoded: EncodedRequest, buffer: StagingBuffer) -> None:
    memory, at = byte_view(buffer.tensor), encoded.base
    for piece in encoded.pieces:
        memory[at : at + len(piece)] = piece
        at += len(piece)


def _error(kind: str, text: str) -> SaveError:
    kinds = {error.__name__: error for error in (SavePeerError, SaveArgumentError)}
    return kinds.get(kind, SaveError)(text)


def _report(fields: Mapping[str, Any]) -> SaveReport:
    leftovers = tuple(Path(name) for name in fields["removed_leftovers"])
    return SaveReport(**{**fields, "path": Path(fields["path"]), "removed_leftovers": leftovers})
