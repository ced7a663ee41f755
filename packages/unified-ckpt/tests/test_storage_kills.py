"""SIGKILL and faults while ranks save to a store, and another process loads under another layout.

Two ranks save one name again and again, each state filled with its step; a third loads it all the
while. The store is a folder behind a layer of faults (torn writes, delays, lost requests and lost
answers, requests that arrive late, old listings), or a server that speaks S3. Every load must be
wholly of one state, or end in an error that says that the store did not answer or the checkpoint
was replaced; never a mix, never damage. In a run the ranks save through a `CheckpointManager`,
which also rotates, and the reader loads the newest checkpoint. The same with large counts:
`benchmarks/unified_ckpt_storage_kills.py`.
"""

import math
import os
import random
import subprocess
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ranktest import collect_ranks, run_ranks
from unified_ckpt import (
    CheckpointManager,
    ManagerOptions,
    Shard,
    get_last_checkpoint,
    load,
    save,
    verify_checkpoint,
)
from unified_ckpt.errors import (
    CorruptCheckpointError,
    DamagedCheckpointWarning,
    LoadError,
    SaveError,
)
from unified_ckpt.files.storage import (
    Fetched,
    LocalStore,
    Location,
    ObjectStore,
    Retrying,
    as_target,
)
from unified_ckpt.plans.checkpoint import is_stored
from unified_ckpt.saving import SaveReport

NUMEL = 60_000
KINDS = ["faults", "s3", "faults run", "s3 run"]
FAULTS = ["refused", "lost answer", "late", "torn", "delay", "none", "none", "none"]


@dataclass
class FaultyStore:
    """A folder whose every call may go wrong, by a seed; one process has one of them."""

    store: ObjectStore
    rng: random.Random

    @property
    def url(self) -> str:
        return f"faulty+{self.store.url}"

    def upload(self, key: str, buffers: Iterable[bytes], *, num_bytes: int) -> None:
        whole = b"".join(bytes(buffer) for buffer in buffers)
        fault = self._begin()
        if fault == "torn":  # some say that it went well, some do not
            cut = self.rng.randrange(len(whole) + 1)
            self.store.upload(key, [whole[:cut]], num_bytes=cut)
            self._lose(self.rng.random() < 0.5)
        else:
            self._do(fault, lambda: self.store.upload(key, [whole], num_bytes=num_bytes))

    def swap(self, key: str, data: bytes, *, old: str | None) -> bool:
        return self._do(self._begin(), lambda: self.store.swap(key, data, old=old))

    def fetch(self, key: str) -> Fetched | None:
        return self._read(lambda: self.store.fetch(key))

    def read(self, key: str, start: int, num_bytes: int) -> bytes:
        return self._read(lambda: self.store.read(key, start, num_bytes))

    def size(self, key: str) -> int | None:
        return self._read(lambda: self.store.size(key))

    def keys(self, prefix: str) -> Sequence[str]:
        found = self._read(lambda: self.store.keys(prefix))
        gone = [f"{key}-that-was" for key in found if self.rng.random() < 0.2]
        return [key for key in found if self.rng.random() < 0.8] + gone

    def children(self, prefix: str) -> Sequence[str]:
        found = self._read(lambda: self.store.children(prefix))
        return [name for name in found if self.rng.random() < 0.8]

    def delete(self, keys: Sequence[str]) -> None:
        self._do(self._begin(), lambda: self.store.delete(keys))

    def _begin(self) -> str:
        fault = self.rng.choice(FAULTS) if self.rng.random() < 0.15 else "none"
        if fault == "delay":
            time.sleep(self.rng.uniform(0.0, 0.03))
        return fault

    def _read(self, work: Callable):
        fault = self._begin()
        self._lose(fault in ("refused", "lost answer"))
        return work()

    def _do(self, fault: str, work: Callable):
        self._lose(fault == "refused")
        if fault == "late":  # it is still on its way when the client gives up
            threading.Timer(self.rng.uniform(0.0, 0.1), lambda: _quietly(work)).start()
        else:
            done = work()
        self._lose(fault in ("late", "lost answer"))
        return done

    def _lose(self, lost: bool) -> None:
        if lost:
            raise ConnectionError("the test lost the connection")


def _quietly(work: Callable) -> None:
    with suppress(OSError):
        work()


def run_of(kind: str, place: str, seed: int, *, faults: bool = True) -> Location:
    """The folder of a run."""
    if "s3" in kind:
        return as_target("place", f"{place}/run-{seed}")
    store = LocalStore(place)
    if not faults:
        return Location(store=store, key="run")
    faulty = FaultyStore(store, random.Random(seed ^ os.getpid()))
    return Location(store=Retrying(faulty, attempts=4), key="run")


def place_of(kind: str, place: str, seed: int) -> Location:
    return run_of(kind, place, seed) / "checkpoint"


def manager_of(folder: Location, group: object) -> CheckpointManager:
    """Manage a run; where connections are lost, try again."""
    options = ManagerOptions(save_total_limit=2, signals=(), lease_s=1.0, timeout_s=10.0)
    for _ in range(20):
        with suppress(SaveError):
            return CheckpointManager(folder, options, group=group)
    return CheckpointManager(folder, options, group=group)


def kill_after(pid: int, delay_s: float) -> None:
    """Let another program kill a process, so that no lock of this process delays it."""
    quiet = {name: subprocess.DEVNULL for name in ("stdin", "stdout", "stderr")}
    command = ["sh", "-c", f"sleep {delay_s:.4f}; kill -9 {pid}"]
    subprocess.Popen(command, start_new_session=True, **quiet)


def shards(rank: int, step: float) -> list[Shard]:
    rows, columns = torch.full((NUMEL,), float(step)), torch.full((50, 20), float(step))
    return [
        Shard.of("rows", rows, global_shape=(2 * NUMEL,), offset=(NUMEL * rank,)),
        Shard.of("columns", columns, global_shape=(50, 40), offset=(0, 20 * rank)),
        Shard.of("replica", torch.tensor(float(step)), global_shape=(), offset=()),
    ]


def load_state(place: Location) -> float:
    """Load all of it as one rank would; return the step, of which there must be one."""
    shapes = {"rows": (2 * NUMEL,), "columns": (50, 40), "replica": ()}
    wanted = {
        part: [
            Shard.of(key, torch.full(shape, -1.0), global_shape=shape, offset=(0,) * len(shape))
            for key, shape in shapes.items()
        ]
        for part in ("model", "optimizer")
    }
    load(wanted, checkpoint_id=place)
    found = {
        value for whole in wanted.values() for s in whole for value in s.tensor.unique().tolist()
    }
    assert len(found) == 1, f"a load mixed the states {sorted(found)[:5]}"
    return found.pop()


def save_steps(rank: int, kind: str, place: str, folder: Path, seed: int, group: object) -> None:
    """Save step after step, until this process or its peer is killed."""
    rng, victims = random.Random(seed), random.Random(seed + 1).choice([{0}, {1}, {0, 1}])
    target = place_of(kind, place, seed)
    manager = manager_of(target.parent, group) if "run" in kind else None
    has_begun = False
    for step in range(1, 10_000):
        parts = {part: shards(rank, step) for part in ("model", "optimizer")}
        with suppress(SaveError if "faults" in kind else ()):
            files = {f"rank-{rank}": b"%d" % step}
            if manager is None:
                save(parts, checkpoint_id=target, group=group, rank_files=files, timeout_s=10.0)
            else:
                manager.save(parts, step, rank_files=files)
            (folder / f"returned-{rank}").write_text(str(step))
            if not has_begun:  # there is a state to be lost
                has_begun = True
                (folder / "begun").touch()
                if rank in victims:
                    kill_after(os.getpid(), rng.uniform(0.0, 0.6))
        if (folder / "ended").exists() and rank not in victims:
            return


def read_on(kind: str, place: str, folder: Path, seed: int) -> dict[str, int]:
    """Load again and again; return how often that was whole, replaced or not answered."""
    counts = {"whole": 0, "named error": 0}
    warnings.simplefilter("error", DamagedCheckpointWarning)
    target, last = place_of(kind, place, seed), 0.0
    until = math.inf
    while (now := time.monotonic()) < until + (0 if counts["whole"] else 10):
        if until == math.inf and (folder / "begun").exists():
            until = now + 0.9
        try:
            found = get_last_checkpoint(target.parent) if "run" in kind else target
            if found is None:
                assert not last, f"there was step {last}, and now there is nothing"
                continue
            step = load_state(found)
        except (CorruptCheckpointError, DamagedCheckpointWarning) as error:
            raise AssertionError(f"a whole checkpoint was called damaged: {error}") from error
        except LoadError:
            counts["named error"] += (folder / "begun").exists()  # else there is nothing yet
            continue
        assert step >= last, f"step {step} was read after {last}"
        last = step
        counts["whole"] += 1
    (folder / "ended").touch()
    return counts


def run_and_kill(kind: str, place: str, folder: Path, seed: int) -> dict[str, int]:
    """Save on two ranks, read on a third, kill one or both; return what the reader counted."""

    def fn(rank: int, world_size: int) -> dict[str, int] | None:
        group = dist.new_group([0, 1])
        if rank == 2:
            return read_on(kind, place, folder, seed)
        save_steps(rank, kind, place, folder, seed, group)
        return None

    outcomes = collect_ranks(fn, 3, timeout_s=120)
    reader = outcomes[2]
    assert reader.ok, reader.error
    kinds = {outcome.error_type for outcome in outcomes[:2]}
    assert "Died" in kinds and kinds <= {"Died", "SavePeerError", None}, outcomes
    return reader.value


def check_after_kill(kind: str, place: str, folder: Path, seed: int) -> None:
    """What stands there is whole, and no older than the last save that returned."""

    def fn(rank: int, world_size: int) -> None:
        target = run_of(kind, place, seed, faults=False) / "checkpoint"
        returned = [int(p.read_text() or 0) for p in folder.glob("returned-*")]
        if "run" in kind:
            check_run(target.parent, max(returned, default=0))
            return
        if not returned:
            return
        assert load_state(target) >= max(returned), returned
        assert verify_checkpoint(target).problems == ()
        report = save_next(target)
        keys = report.path.store.keys(report.path.key)
        folders = {key.split("/")[-2] for key in keys if "/data-" in key}
        assert len(folders) == 1, f"the next save left {folders}"

    run_ranks(fn, 1)


def save_next(target: Location) -> SaveReport:
    """Save over it; once more where a manifest that a killed rank had sent has come meanwhile."""
    state = {"model": shards(0, 7.0)[2:]}
    try:
        return save(state, checkpoint_id=target)
    except SaveError as error:
        assert "another save has written" in str(error), error
        return save(state, checkpoint_id=target)


def check_run(folder: Location, returned: int) -> None:
    """The next job finds the newest state, and nothing else than checkpoints."""
    with manager_of(folder, None) as manager:
        found = manager.resume(load_state)
        assert (0 if found is None else found[1]) >= returned, (found, returned)
        keys = folder.store.keys(folder.key)
        names = {key[len(folder.key) + 1 :].partition("/")[0] for key in keys}
        for place in (folder / name for name in names if name.startswith("checkpoint-")):
            if is_stored(place):
                assert verify_checkpoint(place).problems == (), place
        manager.save({"model": shards(0, 1e4)[2:]}, 10_000)


def try_seed(kind: str, place: str, folder: Path, seed: int) -> dict[str, int]:
    """One kill; what goes wrong names its seed."""
    folder.mkdir()
    try:
        counts = run_and_kill(kind, place, folder, seed)
        check_after_kill(kind, place, folder, seed)
    except (AssertionError, OSError, ValueError) as error:
        raise AssertionError(f"{kind}, seed {seed}: {error}") from error
    return counts


@pytest.mark.parametrize("kind", KINDS)
def test_a_kill_loses_nothing_and_a_reader_sees_whole_states(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    whole = 0
    for number in range(2):
        place = request.getfixturevalue("bucket") if "s3" in kind else str(tmp_path / f"s{number}")
        counts = try_seed(kind, place, tmp_path / str(number), random.randrange(2**32))
        whole += counts["whole"]
    assert whole
