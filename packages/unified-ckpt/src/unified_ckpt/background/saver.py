"""The queue of snapshots between a trainer and its saver process: bounded, loud, restarted.

Who saves reserves a place in the queue, fills its staging memory, and submits it; the saver
process writes it in the background. Nothing here is collective but the constructor, and no thread
of the trainer ever uses the trainer's process groups.

An error of the background shows in the save's `upload_completion`, and once more at the next
`reserve` if nobody has looked at it there. A saver that died is started again by that `reserve`.

    with AsyncSaver() as saver:  # collective
        saver.prepare(state)  # staging memory is there before the first save
        async_save(state, checkpoint_id="run/checkpoint-10", saver=saver)

Length: two threads take the steps of one save here, each of which relies on the others' order.
"""

import atexit
import contextlib
import json
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import wait as wait_futures
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from unified_ckpt.background.config import AsyncSaverConfig
from unified_ckpt.background.offloader import Offloader
from unified_ckpt.background.pending_saves import PendingSave, SaveQueue, UploadFuture
from unified_ckpt.background.process import SaverProcess, open_store
from unified_ckpt.errors import SaveArgumentError, SaveError, check_type
from unified_ckpt.files.storage import Location
from unified_ckpt.geometry import Shard
from unified_ckpt.geometry.tensors import byte_view, collector_paused
from unified_ckpt.loading import load
from unified_ckpt.options import SaveOptions
from unified_ckpt.plans.checkpoint import load_files
from unified_ckpt.saver_process import error_from_json, post_failure, report_from_json
from unified_ckpt.saving.commit import Agreement
from unified_ckpt.snapshots import (
    SnapshotRequest,
    StagingLayout,
    StagingPool,
    encode_request,
    tensors_of,
)
from unified_ckpt.snapshots.average import EMA_FILE, EMA_PART, EmaMemory, average_for
from unified_ckpt.state import StateDict

_COPY_CHUNKS = 64  # each taken by the calling thread or one more
_ROOM_BYTES = 1 << 20  # of a buffer, for values and files that grow from save to save


class AsyncSaver(AbstractContextManager["AsyncSaver"]):
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
        self.config = AsyncSaverConfig() if config is None else config
        check_type("config", self.config, AsyncSaverConfig)
        agreement = Agreement(group, timeout_s=self.config.start_timeout_s, subject="AsyncSaver")
        self._rank = agreement.rank
        self._who = f"rank {agreement.global_rank_here}"
        self._number = 0
        self._pid = os.getpid()  # a forked child has a copy of this object, but no saver process
        self._queue = SaveQueue()
        self._layout = StagingLayout((), (), 0)
        self._layout_json = b""
        self._pool = StagingPool(self.config.num_buffers, room_bytes=_ROOM_BYTES)
        self.offloader = Offloader(_COPY_CHUNKS)  # of saves that copy all at once
        self._ema: EmaMemory | None = None
        self._closed = False
        self._sending = threading.Lock()  # held from taking a save out of the queue to its send
        with contextlib.ExitStack() as undo:  # where some rank could not start, nothing stays
            undo.callback(self.offloader.close)
            self._store, self._settings = open_store(agreement, self.config)
            with agreement.phase("start saver"):
                self._process = self._start()
                undo.callback(self._process.close, timeout_s=0.0)
                self._process.wait_ready(timeout_s=self.config.start_timeout_s)
            undo.pop_all()
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
        self,
        state_dict: StateDict,
        *,
        files: Mapping[str, bytes] | None = None,
        options: SaveOptions | None = None,
    ) -> StagingLayout:
        """Allocate and touch memory for such a state, so that the first save waits for nothing.

        Args:
            state_dict, files, options: as of later saves; files of less than 1 MiB may be left out.

        Raises:
            SaveError: there is not enough memory; the message gives the sizes.
        """
        self._check_open()
        request, parts = SnapshotRequest.of(
            state_dict, checkpoint_id=None, files=files, options=options
        )
        layout = self._layout_of(parts)
        self.offloader.plan(tensors_of(parts), layout)
        encoded = encode_request(request, self._layout_json, base=layout.num_bytes)
        self._pool.prepare(encoded.num_bytes, layout)
        return layout

    def load_ema(self, checkpoint_id: Path | str | Location) -> None:
        """Continue the moving average of a checkpoint, of any layout; after `prepare`.

        Without it the average begins with the first snapshot.

        Raises:
            SaveArgumentError: no average is configured, or `prepare` has not been called.
            LoadError: the checkpoint holds no such average.
        """
        if self._ema is None:
            raise SaveArgumentError("load_ema needs AsyncSaverConfig(ema=...) and prepare() first")
        self.wait()
        self._forget_replays()
        load({EMA_PART: self._ema.shards()}, checkpoint_id=checkpoint_id)
        self._ema.restore(load_files(checkpoint_id, EMA_FILE))

    def average(self) -> list[Shard]:
        """Return the moving average itself, with every snapshot handed over in it; none: empty.

        Raises:
            SaveError: a snapshot was not taken in within twice `timeout_s`.
        """
        limit_s = 2 * self.config.timeout_s
        late = wait_futures(self._queue.expected(), timeout=limit_s).not_done
        self._restart_if_dead()
        if late or not self._queue.wait_replayed(limit_s):
            raise SaveError(f"{self._who}: the average lacks snapshots after {limit_s:g} s")
        return [] if self._ema is None else self._ema.shards()

    def move_average(self, state_dict: StateDict, average: Sequence[Shard]) -> None:
        """Go on in another layout of the same ranks, with the average in its boxes; not collective.

        Args:
            state_dict: as of later saves.
            average: what `average` had on all ranks, in the boxes that `state_dict` has here.

        Raises:
            SaveArgumentError: the boxes of `average` are others.
        """
        _, parts = SnapshotRequest.of(state_dict, checkpoint_id=None)
        if self._ema is not None:
            former, self._ema = self._ema, self._ema.moved(StagingLayout.of(parts), average)
            former.memory.close()

    @collector_paused()
    def reserve(
        self,
        state_dict: StateDict,
        *,
        checkpoint_id: Path | str | Location | None,
        files: Mapping[str, bytes] | None = None,
        rank_files: Mapping[str, bytes] | None = None,
        options: SaveOptions | None = None,
        loss: float | None = None,
    ) -> tuple[PendingSave, Sequence[torch.Tensor]]:
        """Take a staging buffer for a snapshot; every rank does, in the same order of snapshots.

        The arguments are those of `SnapshotRequest.of`.

        Returns:
            The pending save, and the tensors to copy into its views.

        Raises:
            CheckpointTypeError: the state or the files hold something that cannot be saved.
            SaveError: an earlier save failed unseen, the saver process had died (it is started
                again), or no buffer became free in time.
        """
        self._number += 1
        try:
            self._check_open()
            self._restart_if_dead()
            self._raise_unseen()
            snapshot, parts = SnapshotRequest.of(
                state_dict,
                checkpoint_id=checkpoint_id,
                files=files,
                rank_files=rank_files,
                options=options,
                loss=loss,
            )
            layout = self._layout_of(parts)
            self._check_files(snapshot)
            encoded = encode_request(snapshot, self._layout_json, base=layout.num_bytes)
            buffer = self._pool.acquire(
                encoded.num_bytes, timeout_s=self.config.backpressure_timeout_s
            )
        except BaseException as error:  # also what a user's `state_dict` raises
            self._tell_peers(self._number, str(self._as_save_error(error)))
            raise
        encoded.write(byte_view(buffer.tensor))
        pending = PendingSave(
            number=self._number,
            layout=layout,
            buffer=buffer,
            head=encoded.head,
            upload_completion=UploadFuture(),
        )
        self._queue.add(pending)
        return pending, tensors_of(parts)

    def _layout_of(self, parts: Mapping[str, Sequence[Shard]]) -> StagingLayout:
        """Return where the shards stand in a buffer; remembered while they stay alike."""
        if not self._layout.matches(parts) or not self._layout_json:
            layout = StagingLayout.of(parts)
            if any(tensor.is_cuda for tensor in tensors_of(parts)):
                self._pool.pin()
            if self.config.ema is not None:
                self._ema = average_for(self.config.ema, layout, self._ema)
            self._layout = layout  # what was refused will be refused again
            self._layout_json = json.dumps(layout.to_json(), separators=(",", ":")).encode()
        return self._layout

    def _check_files(self, request: SnapshotRequest) -> None:
        if self._ema is not None and EMA_FILE in {*request.files, *request.rank_files}:
            raise SaveArgumentError(f"file {EMA_FILE!r} is the moving average's; use another name")

    def expect(self, pending: PendingSave) -> None:
        """Let `wait` and `close` wait for a save that another thread will submit or abandon."""
        self._queue.expect(pending)

    def submit(self, pending: PendingSave) -> None:
        """Hand a filled snapshot to the saver process; an error shows in `upload_completion`.

        Snapshots reach the process in the order of their numbers, so that all ranks' savers meet
        for the same one; one that is neither submitted nor abandoned holds up the later ones.
        """
        self._queue.submit(pending)
        self._send_ready()

    def abandon(
        self, pending: PendingSave, error: BaseException, *, still_copying: bool = False
    ) -> None:
        """Give a snapshot up that was not submitted; it fails on all ranks.

        With `still_copying` its buffer, into which some thread writes, is not used again.
        """
        if self._queue.withdraw(pending):
            give_back = self._pool.discard if still_copying else self._pool.release
            give_back(pending.buffer)
            self._settle(pending, self._as_save_error(error))
            self._send_ready()

    def _as_save_error(self, error: BaseException) -> SaveError:
        if isinstance(error, SaveError):
            return error
        return SaveError(f"{self._who}: {type(error).__name__}: {error}")

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until everything handed over is written; not collective.

        Raises:
            SaveError: a save failed, or not all ended within `timeout_s`.
        """
        limit_s = 2 * self.config.timeout_s if timeout_s is None else timeout_s
        late = wait_futures(self._queue.expected(), timeout=limit_s).not_done
        if late:
            raise SaveError(f"{self._who}: {len(late)} saves did not end within {limit_s:g} s")
        self._raise_unseen()

    def close(self) -> None:
        """Let the saver process finish and end; not collective. Later calls do nothing.

        In a child that was forked it does nothing either: the saver process is its parent's.

        Raises:
            SaveError: a save failed unseen, or a snapshot was begun and never finished. It has no
                checkpoint, which its `upload_completion` says as well.
        """
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        atexit.unregister(self.close)
        try:
            self._abandon_unfinished()
            self.wait()
        finally:
            self.offloader.close()
            self._process.close(timeout_s=self.config.start_timeout_s)
            left = SaveError(f"{self._who}: the saver was closed before this save had ended")
            self._fail(self._queue.all_open(), left)  # who waits for its outcome must not for ever
            self._forget_replays()
            self._pool.close()
            if self._ema is not None:
                self._ema.memory.close()

    def _abandon_unfinished(self) -> None:
        """Fail what nobody will submit any more; else its outcome would stay open for ever."""
        coming = self._queue.expected()
        for pending in self._queue.all_open():
            if pending.upload_completion not in coming:
                text = (
                    f"{self._who}: snapshot {pending.number} was begun, but not finished before "
                    "the saver was closed, so it is not saved; call ZeroCostSaver.finish() or "
                    "close() before AsyncSaver.close()"
                )
                self.abandon(pending, SaveError(text), still_copying=True)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            self.close()
        except SaveError as failed:
            if error is None:
                raise
            error.add_note(str(failed))  # what ends the training matters more

    def _start(self) -> SaverProcess:
        return SaverProcess(self._settings, on_answer=self._on_answer, on_death=self._on_death)

    def _restart_if_dead(self) -> None:
        if self._process.ended:
            self._process.close(timeout_s=self.config.start_timeout_s)
            with self._sending:
                self._process = self._start()
                for pending in self._queue.to_replay():
                    self._send(pending, replay=True)

    def _forget_replays(self) -> None:
        for pending in self._queue.take_replays():
            self._pool.release(pending.buffer)

    def _check_open(self) -> None:
        if self._closed:
            raise SaveArgumentError("this AsyncSaver is closed; make a new one")

    def _on_answer(self, answer: dict[str, Any]) -> None:
        replayed = self._queue.replayed(answer["number"])
        if replayed is not None:
            self._pool.release(replayed.buffer)
            if "error" in answer:
                text = answer["error"][1]
                self._note_idle(SaveError(f"{self._who}: the average lacks a snapshot: {text}"))
        pending = self._queue.open_save(answer["number"])
        if pending is None:
            return
        if "error" in answer:
            self._fail([pending], error_from_json(answer["error"]))
            return
        report = answer["report"] and report_from_json(answer["report"])
        if self._queue.end(pending):
            self._pool.release(pending.buffer)
            pending.upload_completion.set_result(report)
            self._send_ready()

    def _on_death(self, cause: str) -> None:
        pending_saves = self._queue.running()
        if pending_saves:
            self._fail(pending_saves, self._death(cause), died=True)
        else:
            self._note_idle(self._death(cause))

    def _note_idle(self, error: SaveError) -> None:
        """Let the next call raise an error that belongs to no save under way."""
        idle = UploadFuture()
        idle.set_exception(error)
        self._queue.note_failure(idle)

    def _death(self, cause: str) -> SaveError:
        return SaveError(
            f"{self._who}: the saver process died: {cause}; what it was writing is not saved, "
            "older checkpoints are untouched. A new one is started for the save after the next call"
        )

    def _fail(
        self, pending_saves: Sequence[PendingSave], error: SaveError, *, died: bool = False
    ) -> None:
        replay = died and self._ema is not None
        for pending in pending_saves:
            if not self._queue.end(pending, replay=replay):
                continue
            if not replay:
                self._pool.release(pending.buffer)
            self._settle(pending, error)
        self._send_ready()

    def _settle(self, pending: PendingSave, error: SaveError) -> None:
        self._tell_peers(pending.number, str(error))
        self._queue.note_failure(pending.upload_completion)
        pending.upload_completion.set_exception(error)

    def _send_ready(self) -> None:
        """Send what is submitted, up to the first save that is not; on any thread."""
        while True:
            with self._sending:
                pending = self._queue.next_to_send()
                if pending is None:
                    return
                error = self._try_send(pending)
            if error is not None:
                self._fail([pending], error, died=self._process.ended)

    def _try_send(self, pending: PendingSave) -> SaveError | None:
        if self._process.ended:
            return self._death("it had ended")
        try:
            self._send(pending, replay=False)
        except BlockingIOError as error:
            return SaveError(f"{self._who}: the saver is stuck: {error}")
        except OSError:
            pass  # it has just ended; the listener fails all that runs
        return None

    def _send(self, pending: PendingSave, *, replay: bool) -> None:
        message = {"kind": "use", "number": pending.number, "head": pending.head, "replay": replay}
        average = [] if self._ema is None else [self._ema.memory.fd]
        self._process.send(message, pending.buffer.memory.fd, *average)

    def _raise_unseen(self) -> None:
        if (error := self._queue.take_unseen()) is not None:
            text = f"since the last call a save failed, or could not have: {error}"
            raise SaveError(text) from error

    def _tell_peers(self, number: int, text: str) -> None:
        """Let the savers of other ranks fail at once instead of waiting for this one."""
        if self._store is None:
            return
        with contextlib.suppress(RuntimeError):  # the store's host is gone: its peers know already
            post_failure(self._store, number, text)
