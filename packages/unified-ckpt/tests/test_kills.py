"""SIGKILL at random moments of saves, overwrites and rotation: nothing that was there is lost.

The victims are one rank, all ranks, or the saver process of one rank that saves in the background.

The ranks save one checkpoint after the other, each filled with its step number, and are killed from
outside at a uniformly random moment. What stands under a checkpoint's name then must be whole and
bit for bit a state that was saved; the newest is no older than the last save that returned. All the
while a third process loads what is there, under other layouts: each of its loads is wholly of one
save, or ends in the error that says that the checkpoint was replaced; none is mixed, none is called
damaged, and none is older than the one before.
`benchmarks/unified_ckpt_kills.py` runs the same with large counts.
"""

import multiprocessing
import os
import random
import subprocess
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from ranktest import collect_ranks
from unified_ckpt import Shard, get_last_checkpoint, load, rotate, save, verify_checkpoint
from unified_ckpt.background.async_saving import async_save
from unified_ckpt.background.config import AsyncSaverConfig
from unified_ckpt.background.saver import AsyncSaver
from unified_ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    LoadError,
    ReplacedCheckpointError,
    SaveError,
)

NUMEL = 60_000
MODES = ["one rank", "all ranks", "one saver"]


def kill_after(pid: int, delay_s: float) -> None:
    """Let another program kill a process, so that no lock of this process delays it.

    Not a fork: this process has threads by now, and a child may inherit a lock that one of them
    holds. Its streams are closed, so that it keeps no pipe of the test open.
    """
    subprocess.Popen(
        ["sh", "-c", f"sleep {delay_s:.4f}; kill -9 {pid}"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def shards(rank: int, world_size: int, step: float) -> list[Shard]:
    step = float(step)
    rows = Shard.of(
        "rows",
        torch.full((NUMEL,), step),
        global_shape=(NUMEL * world_size,),
        offset=(NUMEL * rank,),
    )
    columns = Shard.of(
        "columns",
        torch.full((50, 20), step),
        global_shape=(50, 20 * world_size),
        offset=(0, 20 * rank),
    )
    replica = Shard.of("replica", torch.tensor(step), global_shape=(), offset=())
    return [rows, columns, replica]


@dataclass
class Readings:
    """What a reader saw: loads that succeeded, those that were told to read again, and a fault."""

    loads: int = 0
    replaced: int = 0
    newest: float = 0.0
    problem: str = ""


def read_once(folder: Path, rng: random.Random, seen: Readings, *, overwrite: bool) -> None:
    """Load a random box of every tensor of the newest checkpoint."""
    begin, end = sorted(rng.sample(range(2 * NUMEL + 1), 2))
    left, right = sorted(rng.sample(range(41), 2))
    state = {
        part: [
            Shard.of(
                "rows",
                torch.full((end - begin,), -1.0),
                global_shape=(2 * NUMEL,),
                offset=(begin,),
            ),
            Shard.of(
                "columns",
                torch.full((50, right - left), -1.0),
                global_shape=(50, 40),
                offset=(0, left),
            ),
        ]
        for part in ("model", "optimizer")
    }
    place = folder / "checkpoint-0" if overwrite else get_last_checkpoint(folder)
    if place is None or not (seen.loads or place.exists()):
        return  # nothing was saved yet
    try:
        load(state, checkpoint_id=place, verify=rng.choice([True, False, "touched"]))
    except ReplacedCheckpointError:
        seen.replaced += 1
        return
    except LoadError as error:
        if overwrite or isinstance(error, CorruptCheckpointError) or place.exists():
            raise
        return  # it was rotated away before it was opened
    values = {v for shards in state.values() for s in shards for v in s.tensor.unique().tolist()}
    if len(values) != 1 or min(values) < seen.newest:
        raise AssertionError(f"loaded {sorted(values)} after {seen.newest}")
    (seen.newest,) = values
    seen.loads += 1


@contextmanager
def reader(folder: Path, seed: int, *, overwrite: bool) -> Iterator[Readings]:
    """A process that loads without a pause; what it saw is known afterwards."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def read() -> None:
        torch.set_num_threads(1)
        seen = Readings()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # among them: a checkpoint that counts as damaged
                rng = random.Random(seed)
                while not theirs.poll():
                    read_once(folder, rng, seen, overwrite=overwrite)
        except (AssertionError, CheckpointError, OSError, UserWarning, ValueError):
            seen.problem = traceback.format_exc()
        theirs.send(seen)
        os._exit(0)

    process = context.Process(target=read, daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child uses one thread only
        process.start()
    seen = Readings()
    try:
        yield seen
    finally:
        ours.send("stop")
        found = ours.recv() if ours.poll(60.0) else Readings(problem="the reader hangs")
        process.kill()
        process.join()
    vars(seen).update(vars(found))


def run_and_kill(folder: Path, mode: str, seed: int, *, overwrite: bool) -> Readings:
    """Save and kill beside a reader; return what it saw."""
    with reader(folder, seed, overwrite=overwrite) as seen:
        save_and_kill(folder, mode, seed, overwrite=overwrite)
    return seen


def save_and_kill(folder: Path, mode: str, seed: int, *, overwrite: bool) -> None:
    rng = random.Random(seed)
    world_size, delay_s = 2, rng.uniform(0.0, 0.25)
    victims = set(range(world_size)) if mode == "all ranks" else {rng.randrange(world_size)}

    def steps(rank: int, world_size: int, saver: AsyncSaver | None) -> None:
        for step in range(1, 10_000):
            name = "checkpoint-0" if overwrite else f"checkpoint-{step}"
            parts = {part: shards(rank, world_size, step) for part in ("model", "optimizer")}
            files = {f"rank-{rank}": b"%d" % step}
            place = folder / name
            if saver is None:
                save(parts, checkpoint_id=place, rank_files=files, timeout_s=5.0)
            else:
                response = async_save(parts, checkpoint_id=place, rank_files=files, saver=saver)
                response.upload_completion.result(timeout=20.0)
            (folder / f"returned-{rank}").write_text(str(step))
            if rank == 0:
                rotate(folder, 2)
            if step == 1 and rank in victims:
                kill_after(os.getpid() if saver is None else saver.pid, delay_s)

    def fn(rank: int, world_size: int) -> None:
        if mode != "one saver":
            steps(rank, world_size, None)
        saver = AsyncSaver(config=AsyncSaverConfig(timeout_s=5.0))
        try:
            steps(rank, world_size, saver)
        finally:
            with suppress(SaveError):
                saver.close()

    outcomes = collect_ranks(fn, world_size, timeout_s=240)
    kinds = {outcome.error_type for outcome in outcomes}
    if mode == "one saver":  # the trainers live, and both hear of it
        assert kinds <= {"SaveError", "SavePeerError"}, outcomes
    else:  # a rank that outlives a peer, if only by a moment, reports it as lost
        assert "Died" in kinds and kinds <= {"Died", "SavePeerError"}, outcomes


def state_of(checkpoint: Path, part: str) -> set[float]:
    found: set[float] = set()
    for key, shape in {"rows": (2 * NUMEL,), "columns": (50, 40), "replica": ()}.items():
        tensor = torch.full(shape, -1.0)
        whole = Shard.of(key, tensor, global_shape=shape, offset=(0,) * len(shape))
        load([whole], checkpoint_id=checkpoint, part=part)
        found |= set(tensor.flatten().tolist())
    return found


def check_after_kill(folder: Path) -> None:
    returned = max(int(p.read_text() or 0) for p in folder.glob("returned-*"))
    newest = get_last_checkpoint(folder)
    assert newest is not None
    (newest_step,) = state_of(newest, "model")
    assert newest_step >= returned, (newest_step, returned)
    for checkpoint in folder.glob("checkpoint-*"):
        assert verify_checkpoint(checkpoint).problems == (), checkpoint
        states = state_of(checkpoint, "model") | state_of(checkpoint, "optimizer")
        assert len(states) == 1, (checkpoint, states)
        (step,) = states
        assert checkpoint.name in ("checkpoint-0", f"checkpoint-{step:.0f}")
    shard = shards(0, 1, 1.0)
    save({"model": shard}, checkpoint_id=folder / "checkpoint-99999")
    assert not [p for p in folder.iterdir() if p.name.startswith(".")]


@pytest.mark.parametrize("mode", MODES[:2])  # the third starts processes for seconds; a claim
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_kill_at_any_moment_loses_nothing(mode: str, overwrite: bool, tmp_path: Path) -> None:
    loads = 0
    for number in range(2):
        seed = random.randrange(2**32)
        folder = tmp_path / str(number)
        folder.mkdir()
        seen = run_and_kill(folder, mode, seed, overwrite=overwrite)
        loads += seen.loads
        try:
            assert not seen.problem, seen.problem
            check_after_kill(folder)
        except Exception as error:
            raise AssertionError(f"seed {seed}, {sorted(os.listdir(folder))}: {error}") from error
    assert loads, "the reader never loaded anything"
