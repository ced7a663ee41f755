"""What a save to `file://` asks of a file system that several machines share, such as NFS.

Two ranks save, and every file that either opens for writing, renames or links is recorded by an
audit hook: no file has two writers, none is opened again once it has its name, each is fsynced and
closed before that (so that close-to-open consistency is enough), and no names are exchanged. Leases
where there are no locks: `run/test_hold.py`.
"""

import fcntl
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ranktest import run_ranks
from unified_ckpt import CheckpointManager, ManagerOptions, Shard, load
from unified_ckpt.files import system
from unified_ckpt.files.storage import local

Events = list[tuple[str, str, str]]


def record_into(events: Events, root: Path) -> None:
    """Record this process's calls below a folder; in a forked rank, so nothing is put back."""
    names: dict[int, str] = {}

    def hook(event: str, arguments: tuple) -> None:
        if event == "open" and isinstance(arguments[2], int):
            path, writes = arguments[0], arguments[2] & (os.O_WRONLY | os.O_RDWR)
            if isinstance(path, Path | str) and str(path).startswith(str(root)) and writes:
                events.append(("open", str(path), ""))
        if event in ("os.rename", "os.link") and str(arguments[0]).startswith(str(root)):
            events.append(("name", str(arguments[0]), str(arguments[1])))

    def sync_file(fd: int) -> None:
        os.fsync(fd)
        names[fd] = os.readlink(f"/proc/self/fd/{fd}")
        events.append(("sync", names[fd], ""))

    def close(fd: int) -> None:
        target = os.readlink(f"/proc/self/fd/{fd}")
        real_close(fd)
        if target.startswith(str(root)):
            events.append(("close", target, ""))

    def refuse(a: Path, b: Path) -> int:
        raise AssertionError(f"{a} and {b} were to be exchanged")

    real_close, os.close = os.close, close
    local.sync_file = sync_file
    system._renameat2 = refuse
    sys.addaudithook(hook)


@pytest.mark.parametrize("locks", [True, False])
def test_no_file_has_two_writers_and_none_changes_once_it_has_its_name(
    locks: bool, tmp_path: Path
) -> None:
    def fn(rank: int, world_size: int) -> Events:
        if not locks:

            def flock(fd: int, how: int) -> None:
                raise OSError("no locks")

            fcntl.flock = flock
        events: Events = []
        record_into(events, tmp_path)
        tensor = torch.full((4,), float(rank))
        state = [Shard.of("w", tensor, global_shape=(8,), offset=(4 * rank,))]
        options = ManagerOptions(save_total_limit=1, signals=())
        with CheckpointManager(f"file://{tmp_path}/run", options) as manager:
            for step in (1, 2, 2):
                manager.save({"model": state}, step, rank_files={f"own-{rank}": b"mine"})
            whole = torch.zeros(8)
            load({"model": {"w": whole}}, checkpoint_id=manager.path(2))
        assert whole.tolist() == [0.0] * 4 + [1.0] * 4
        dist.barrier()
        return events

    per_rank = [
        [e for e in events if ".unified-ckpt-lock-" not in e[1]] for events in run_ranks(fn, 2)
    ]
    written = [{path for kind, path, _ in events if kind == "open"} for events in per_rank]
    assert written[0] and written[1] and not written[0] & written[1]
    named = {new for events in per_rank for kind, _, new in events if kind == "name"}
    assert not named & (written[0] | written[1]), "what has its name is never written to"
    for events in per_rank:
        opened = [path for kind, path, _ in events if kind == "open"]
        assert len(opened) == len(set(opened))
        for number, (kind, path, _) in enumerate(events):
            if kind == "name":
                before = [e[0] for e in events[:number] if e[1] == path]
                assert before == ["open", "sync", "close"], (path, before)
