"""The saver process: writes what its trainer staged, and ends when its trainer has ended.

It takes one snapshot after the other: moving average, then the same `save` that the trainer could
have called, over a gloo group of saver processes. It never touches the trainer's groups.

    python -m unified_ckpt.saver_process.main '{"socket_fd": 5, "parent_pid": 17, ...}'
"""

import json
import os
import signal
import socket
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from unified_ckpt.errors import CheckpointError, SaveError, SavePeerError
from unified_ckpt.folders import step_of
from unified_ckpt.geometry import Shard
from unified_ckpt.geometry.tensors import byte_view
from unified_ckpt.saver_process.answers import MAX_MESSAGE_BYTES, error_to_json, report_to_json
from unified_ckpt.saver_process.rendezvous import SaverRendezvous, connect_store
from unified_ckpt.saving import Request, SaveReport, save_request
from unified_ckpt.snapshots import SharedMemory, SnapshotRequest, StagingLayout, decode_request
from unified_ckpt.snapshots.average import EMA_FILE, EMA_PART, EmaConfig, EmaMemory
from unified_ckpt.tiers import NodeTier, TierOptions

_ORPHAN_POLL_S = 0.2
# They reach all processes of a terminal or a job, and may ask the trainer for a last checkpoint.
_OF_THE_TRAINER = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class SaverWorker:
    """The work of one saver process.

    Args:
        settings: what `SaverProcess` was given.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._timeout_s = float(settings["timeout_s"])
        self._max_mapped = int(settings["num_buffers"]) + 1
        self._mapped: OrderedDict[int, SharedMemory] = OrderedDict()
        self._layout_json = b""
        self._layout = StagingLayout((), (), 0)
        self._ema: EmaMemory | None = None
        self._ema_config = EmaConfig(**settings["ema"])
        tier = settings["tier"]
        self._tier_options = None if tier is None else TierOptions(**tier)
        self._tier: NodeTier | None = None
        self._tier_group = -1  # the group of savers that the tier was opened over
        store = settings["store"]
        if store is not None:
            store = connect_store(*store, timeout_s=settings["start_timeout_s"])
        self._rendezvous = SaverRendezvous(
            store, rank=settings["rank"], size=settings["size"], timeout_s=self._timeout_s
        )

    def run(self, message: Mapping[str, Any], fds: Sequence[int]) -> dict[str, Any]:
        """Do what a message asks; return the answer, which holds the error if there was one.

        The descriptors are the staging buffer's and, with a moving average, the average's.
        """
        number = message["number"]
        answer: dict[str, Any] = {"kind": "done", "number": number, "report": None}
        try:
            memory, *average = [self._map(fd) for fd in fds]
            request, layout_json = decode_request(byte_view(memory.tensor), message["head"])
            if layout_json != self._layout_json:
                self._layout = StagingLayout.from_json(json.loads(layout_json))
                self._layout_json = layout_json
            self._attach_ema(average)
            if message["replay"]:
                self._replay(number, request, memory)
            else:
                answer["report"] = self._use(number, request, memory)
        except (CheckpointError, OSError, ValueError, TypeError, RuntimeError) as error:
            if isinstance(error, SavePeerError):
                self._rendezvous.leave()
            answer["error"] = error_to_json(error)
        return answer

    def _use(
        self, number: int, request: SnapshotRequest, memory: SharedMemory
    ) -> dict[str, Any] | None:
        """Take a snapshot in and save it, on all ranks or on none."""
        save = request.checkpoint_id is not None
        stays = self._stays_in_tier(request)
        name = Path(str(request.checkpoint_id)).name if stays else request.checkpoint_id
        updates = None if self._ema is None else self._ema.num_updates
        note = {"checkpoint_id": name, "tier only": stays, "loss": request.loss, "ema": updates}
        self._rendezvous.enter(number, note=note)
        parts: dict[str, Sequence[Shard]] = dict(self._layout.shards(memory.tensor))
        if self._ema is not None:
            self._ema.update(self._layout, memory.tensor, number=number, loss=request.loss)
        if self._ema is not None and self._ema.num_updates:  # before the first it is no average
            parts[EMA_PART] = self._ema.shards()
            request = replace(request, files={**request.files, EMA_FILE: self._ema.state()})
        if not save:
            return None
        self._rendezvous.form(number)
        if stays:
            return report_to_json(self._save_in_tier(request, parts))
        lost: SaveError | None = None
        if self._tier_options is not None:
            try:
                self._save_in_tier(request, parts)
            except SavePeerError:
                raise
            except SaveError as error:  # what fails there must not lose the checkpoint in storage
                lost = error
        report = save_request(lambda: request.save_request(parts), timeout_s=self._timeout_s)
        if lost is not None:
            raise SaveError(f"{report.path} is committed, but not in the tier: {lost}") from lost
        return report_to_json(report)

    def _stays_in_tier(self, request: SnapshotRequest) -> bool:
        """Whether a checkpoint's name is one in the tier's folder."""
        folder = None if self._tier_options is None else self._tier_options.path
        return request.checkpoint_id is not None and Path(request.checkpoint_id).parent == folder

    def _save_in_tier(
        self, request: SnapshotRequest, parts: Mapping[str, Sequence[Shard]]
    ) -> SaveReport:
        """Save on the nodes, over the group that the savers have now."""
        group = self._rendezvous.group
        if self._tier is None or self._tier_group != group:
            if self._tier is not None:
                self._tier.close()
            self._tier = None if self._tier_options is None else NodeTier(self._tier_options)
            self._tier_group = group
        if self._tier is None:
            raise SaveError("there is no tier")

        def make(target: Path) -> Request:
            return replace(request, checkpoint_id=str(target)).save_request(parts)

        step = step_of(Path(str(request.checkpoint_id)))
        return self._tier.save_made(make, step).own

    def _replay(self, number: int, request: SnapshotRequest, memory: SharedMemory) -> None:
        """Bring the average to where the other ranks have it, after a saver that died."""
        if self._ema is not None and self._rendezvous.agreed(number):
            self._ema.update(self._layout, memory.tensor, number=number, loss=request.loss)

    def _attach_ema(self, average: Sequence[SharedMemory]) -> None:
        for shared in average:
            if self._ema is None or self._ema.memory is not shared:
                self._ema = EmaMemory(self._ema_config, self._layout, shared)

    def _map(self, fd: int) -> SharedMemory:
        """Map a buffer once, however often its descriptor comes; forget buffers long unused."""
        inode = os.fstat(fd).st_ino
        if inode in self._mapped:
            os.close(fd)
        else:
            self._mapped[inode] = SharedMemory.attach(fd)
        self._mapped.move_to_end(inode)
        while len(self._mapped) > self._max_mapped:
            self._mapped.popitem(last=False)[1].close()
        return self._mapped[inode]


def watch_parent(parent_pid: int, busy: threading.Event, *, grace_s: float) -> None:
    """End this process when its trainer is gone; what is under way has `grace_s` to finish."""
    gone_at: float | None = None
    while True:
        if os.getppid() != parent_pid:
            gone_at = gone_at or time.monotonic()
            if not busy.is_set() or time.monotonic() > gone_at + grace_s:
                os._exit(1)
        time.sleep(_ORPHAN_POLL_S)


def main(argv: list[str]) -> int:
    """Serve the trainer until it closes the socket or asks to end."""
    settings = json.loads(argv[0])
    for ignored in _OF_THE_TRAINER:
        signal.signal(ignored, signal.SIG_IGN)
    busy = threading.Event()
    threading.Thread(
        target=watch_parent,
        args=(settings["parent_pid"], busy),
        kwargs={"grace_s": settings["orphan_grace_s"]},
        daemon=True,
    ).start()
    os.nice(settings["niceness"])
    torch.set_num_threads(1)  # the machine's cores are the trainer's
    trainer = socket.socket(fileno=settings["socket_fd"])
    worker = SaverWorker(settings)
    trainer.sendall(json.dumps({"kind": "ready"}).encode())
    while True:
        busy.clear()
        raw, fds, _, _ = socket.recv_fds(trainer, MAX_MESSAGE_BYTES, 4)
        busy.set()
        message = json.loads(raw) if raw else {"kind": "close"}
        if message["kind"] == "close":
            return 0
        answer = worker.run(message, fds)
        try:
            trainer.sendall(json.dumps(answer).encode())
        except OSError:
            return 1  # the trainer is gone; what it asked for is done


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))  # at once: there is nothing to tear down
