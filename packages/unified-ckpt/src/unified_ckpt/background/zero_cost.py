"""Saves that cost the trainer next to nothing: the copy runs beside the next step's microbatches.

Parameters and optimizer states change only in `optimizer.step`. So a snapshot that begins right
after a step has until the next one, and its copy is cut into one chunk a microbatch. `finish`,
called by a hook before the next step, waits for what is left; the snapshot is the state at the
step boundary, bit for bit.

    zero_cost = ZeroCostSaver(saver, num_microbatches=8)
    zero_cost.attach(optimizer, model)  # then begin_save is the only call that a loop needs
    for step, batches in enumerate(data):
        for batch in batches:
            model(batch).backward()  # a hook copies one chunk
        optimizer.step()  # a hook ends the snapshot first
        zero_cost.begin_save(state, checkpoint_id=f"run/checkpoint-{step}")
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from unified_ckpt._torch_private import version_of
from unified_ckpt.background.offloader import Offloader
from unified_ckpt.background.pending_saves import PendingSave, UploadFuture
from unified_ckpt.background.saver import AsyncSaver
from unified_ckpt.errors import CheckpointValueError, SaveError, check_type
from unified_ckpt.files.storage import Location
from unified_ckpt.options import SaveOptions
from unified_ckpt.snapshots import SnapshotRequest, tensors_of
from unified_ckpt.state import StateDict


class ZeroCostSaver:
    """Chunked snapshots through an `AsyncSaver`; used by the thread that trains.

    Args:
        saver: writes the snapshots; it is not closed by this object.
        num_microbatches: of a step; the copy is cut into that many chunks.
        check_changes: record the tensors' version counters and raise in `finish` where one was
            changed before its snapshot was done, as buffers are that a forward changes: give
            `begin_save` clones of those. Changes through `.data` do not count versions. False:
            such a snapshot is saved, torn.
        timeout_s: bound on the wait in `finish`.
    """

    def __init__(
        self,
        saver: AsyncSaver,
        *,
        num_microbatches: int,
        check_changes: bool = True,
        timeout_s: float = 600.0,
    ) -> None:
        check_type("saver", saver, AsyncSaver)
        check_type("num_microbatches", num_microbatches, int)
        if num_microbatches < 1:
            raise CheckpointValueError(f"num_microbatches={num_microbatches} must be at least 1")
        if not (math.isfinite(timeout_s) and timeout_s > 0):
            raise CheckpointValueError(f"timeout_s={timeout_s} must be a positive number")
        self.stall_s = 0.0  # time that the trainer has spent in calls of this object
        self._saver = saver
        self._check_changes = check_changes
        self._timeout_s = timeout_s
        self._offloader = Offloader(num_microbatches)
        self._pending: PendingSave | None = None
        self._versions: list[tuple[str, torch.Tensor, int]] = []
        self._hooks: list[RemovableHandle] = []

    def prepare(
        self,
        state_dict: StateDict,
        *,
        files: Mapping[str, bytes] | None = None,
        options: SaveOptions | None = None,
    ) -> None:
        """Allocate staging memory and plan, so that the first save costs what later ones cost.

        The arguments are those of `AsyncSaver.prepare`.

        Raises:
            SaveError: there is not enough memory.
        """
        _, parts = SnapshotRequest.of(state_dict, checkpoint_id=None, options=options)
        layout = self._saver.prepare(state_dict, files=files, options=options)
        self._offloader.plan(tensors_of(parts), layout)

    def attach(
        self, optimizer: torch.optim.Optimizer, module: torch.nn.Module | None = None
    ) -> None:
        """Call `finish` before every step of the optimizer, `offload_chunk` before every forward.

        The module is the one whose forward is called once a microbatch; None calls no chunks.
        """
        self._hooks.append(optimizer.register_step_pre_hook(lambda *_: self.finish()))
        if module is not None:
            self._hooks.append(module.register_forward_pre_hook(self._offload))

    def begin_save(
        self,
        state_dict: StateDict,
        *,
        checkpoint_id: Path | str | Location | None,
        files: Mapping[str, bytes] | None = None,
        rank_files: Mapping[str, bytes] | None = None,
        options: SaveOptions | None = None,
        loss: float | None = None,
    ) -> UploadFuture:
        """Begin a snapshot right after `optimizer.step`; every rank of the saver's group calls it.

        The tensors must not change until `finish` has returned. A snapshot that is still under way
        is finished first.

        Args:
            state_dict: as in `save`; the tensors themselves, whose memory is read until `finish`.
                Parts of ready-made `Shard`s cost the least to take apart.
            checkpoint_id: as in `save`; None for a snapshot that only updates the moving average.
            files, rank_files, options: as in `save`; the saver process compresses moments.
            loss: of this step, the same on all ranks; for a moving average (see `EmaConfig`).

        Returns:
            The outcome; it stays open until `finish`, and the saver process, have done their part.

        Raises:
            SaveError: as in `async_save`.
        """
        self.finish()
        with self._stalling():
            pending, tensors = self._saver.reserve(
                state_dict,
                checkpoint_id=checkpoint_id,
                files=files,
                rank_files=rank_files,
                options=options,
                loss=loss,
            )
            try:
                if self._check_changes:
                    keys = [entry.meta.key for entry in pending.layout.entries]
                    self._versions = [
                        (key, tensor, version_of(tensor))
                        for key, tensor in zip(keys, tensors, strict=True)
                    ]
                views = pending.buffer.views(pending.layout)
                self._offloader.start(tensors, views, pending.layout)
            except BaseException as error:  # an open save would hold up all later ones
                self._saver.abandon(pending, error)
                raise
            self._pending = pending
        return pending.upload_completion

    def offload_chunk(self) -> None:
        """Let one more chunk be copied, if a snapshot is under way; call it once a microbatch."""
        if self._pending is not None:
            with self._stalling():
                self._offloader.issue_next()

    def finish(self) -> None:
        """End the snapshot under way, if any: afterwards the tensors may change.

        Raises:
            SaveError: a copy failed or took too long, or with `check_changes` a tensor has changed.
                This checkpoint then fails on all ranks.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        changed = [key for key, tensor, version in self._versions if version_of(tensor) != version]
        self._versions = []
        torn = _torn(changed)

        def end() -> None:
            if torn is None:
                self._saver.submit(pending)
            else:
                self._saver.abandon(pending, torn)

        with self._stalling():
            try:
                self._saver.expect(pending)
                self._offloader.finish(
                    end,
                    on_error=lambda error: self._saver.abandon(pending, error),
                    timeout_s=self._timeout_s,
                )
            except BaseException as error:  # an open save would hold up all later ones
                self._saver.abandon(pending, error, still_copying=self._offloader.busy)
                raise
        if torn is not None:
            raise torn

    def close(self) -> None:
        """Finish, remove the hooks, end the copying thread, even if `finish` raises."""
        try:
            self.finish()
        finally:
            for hook in self._hooks:
                hook.remove()
            self._hooks = []
            self._offloader.close()

    @contextmanager
    def _stalling(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.stall_s += time.perf_counter() - started

    def _offload(self, *_: Any) -> None:
        self.offload_chunk()


def _torn(changed: Sequence[str]) -> SaveError | None:
    if not changed:
        return None
    shown = ", ".join(map(repr, changed[:5]))
    return SaveError(
        f"{len(changed)} tensors changed between begin_save and finish, so the snapshot is no "
        f"state that existed: {shown}; change them only after finish(), or give begin_save clones "
        "of buffers that a forward changes"
    )
