"""SIGKILL of all ranks of one node at any phase of a save in the tier, with the node's memory gone.

Ranks on three nodes save every few steps; then all ranks of one node are killed, at a phase that is
named or at a random moment, and its folder is removed. The job starts again with a fresh node in
its place. Every rank must get a state that was saved, wholly and to the bit, and no more steps are
lost than the recovery goal says, which is computed from the plan.
`benchmarks/unified_ckpt_tier_kills.py` runs the same with large counts.
"""

import os
import random
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from ranktest import collect_ranks, run_ranks
from unified_ckpt import (
    AsyncSaver,
    AsyncSaverConfig,
    CheckpointManager,
    Shard,
    async_save,
    load,
    verify_checkpoint,
)
from unified_ckpt.errors import SaveError
from unified_ckpt.run import resume_nearest
from unified_ckpt.saving.commit import Agreement
from unified_ckpt.tiers import NodeTier, TierOptions, held_copies, recovery_goals

NAMES = ["a", "b", "b", "c"]
TIER_STEPS = 2
PHASES = ["begin", "describe", "room", "prepare", "write", "commit", "save", "open copies", "copy"]
PHASES += ["publish", "free"]
NUMEL = 30_000


@pytest.fixture
def memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="unified-ckpt-tier-", dir="/dev/shm") as folder:
        yield Path(folder)


def state(rank: int, world_size: int, step: float) -> dict[str, list[Shard]]:
    def part(seed: int) -> list[Shard]:
        generator = torch.Generator().manual_seed(1000 * int(step) + 10 * rank + seed)
        shape, offset = (NUMEL * world_size,), (NUMEL * rank,)
        rows = torch.rand(NUMEL, generator=generator)
        return [
            Shard.of("rows", rows, global_shape=shape, offset=offset),
            Shard.of("step", torch.tensor(float(step)), global_shape=(), offset=()),
        ]

    return {"model": part(1), "optimizer": part(2)}


def tier_of(memory: Path, node: str) -> NodeTier:
    return NodeTier(TierOptions(folder=memory / node, node=node, timeout_s=20.0))


def kill_at(phase: str) -> None:
    """Let this process die by SIGKILL when it comes to the end of a phase."""
    gather = Agreement.gather

    def deadly(self: Agreement, name: str, payload: object) -> object:
        if name == phase:
            os.kill(os.getpid(), signal.SIGKILL)
        return gather(self, name, payload)

    Agreement.gather = deadly  # in this process alone, which does not outlive it


def train_until_killed(
    memory: Path, told: Path, *, phase: str | None, delay_s: float = 0.0, victim: str = "b"
) -> None:
    """Train and save in the tier; after step 4 the victim's ranks die, and so does its memory."""

    def fn(rank: int, world_size: int) -> None:
        node = NAMES[rank]
        with tier_of(memory, node) as tier:
            for step in range(1, 10_000):
                (told / f"next-{rank}").write_text(str(step))
                (told / f"next-{rank}").replace(told / f"finished-{rank}")  # never half
                if step % TIER_STEPS:
                    continue
                if step == 6 and node == victim:
                    if phase == "free":
                        tier._free = lambda: tier._state[0] == 6 and os.kill(os.getpid(), 9)
                    elif phase is not None:
                        kill_at(phase)
                    else:
                        deadly = threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL))
                        deadly.start()
                tier.save(state(rank, world_size, step), step, rank_files={f"r{rank}": b"x"})

    outcomes = collect_ranks(fn, len(NAMES), timeout_s=240)
    lost = {"SavePeerError", "SaveError"}
    for node, outcome in zip(NAMES, outcomes, strict=True):
        # By the clock, one rank of the node may see the other one die before it does itself.
        allowed = lost if node != victim else {"Died"} | (set() if phase else lost)
        assert outcome.error_type in allowed, outcome
    assert "Died" in {outcome.error_type for outcome in outcomes}
    shutil.rmtree(memory / victim)


def check_resume(memory: Path, told: Path, victim: str = "b") -> int:
    """Start again with a fresh node; return the step of the state that every rank got."""
    names = ["fresh" if name == victim else name for name in NAMES]
    finished = max(int(path.read_text()) for path in told.glob("finished-*"))

    def fn(rank: int, world_size: int) -> tuple[int, int]:
        found = state(rank, world_size, 0)
        with CheckpointManager(told / "run") as manager, tier_of(memory, names[rank]) as tier:
            goals = recovery_goals(tier.plan, tier_steps=TIER_STEPS, storage_steps=None)
            (goal,) = (goal for goal in goals if goal.lost_nodes == 1)
            place = resume_nearest(manager, tier, lambda place: load(found, checkpoint_id=place))
            assert place is not None and place[0].is_relative_to(memory / names[rank])
            step = int(found["model"][1].tensor)
            right = state(rank, world_size, step)
            for part in right:
                for got, wanted in zip(found[part], right[part], strict=True):
                    assert torch.equal(got.tensor, wanted.tensor), (step, part, got.key)
            tier.save(state(rank, world_size, step + 1), step + 1)
        return step, goal.lost_steps

    steps, (goal, *_) = zip(*run_ranks(fn, len(names), timeout_s=240), strict=True)
    assert len(set(steps)) == 1, steps
    assert finished - steps[0] <= goal, (finished, steps, goal)
    return steps[0]


@pytest.mark.parametrize("phase", PHASES)
def test_a_node_that_dies_at_any_phase_costs_no_more_than_the_goal(
    phase: str, memory: Path, tmp_path: Path
) -> None:
    train_until_killed(memory, tmp_path, phase=phase)
    found = check_resume(memory, tmp_path)
    if phase == "free":
        assert found == 6  # complete, though the state before was still there
    elif phase != "publish":  # there, the others may have published what the dead had sent
        assert found == 4


def test_a_node_that_dies_at_any_moment_costs_no_more_than_the_goal(
    memory: Path, tmp_path: Path
) -> None:
    rng = random.Random(seed := random.randrange(2**32))
    victim = rng.choice("abc")
    train_until_killed(memory, tmp_path, phase=None, delay_s=rng.uniform(0.0, 0.3), victim=victim)
    try:
        check_resume(memory, tmp_path, victim)
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}") from error


def test_savers_beside_training_fill_the_tier_and_storage_behind_it(
    memory: Path, tmp_path: Path
) -> None:
    """A saver is killed on the way; then a node with its trainer, its saver and its memory."""
    run = tmp_path / "run"

    def fn(rank: int, world_size: int) -> None:
        tier = TierOptions(folder=memory / "ab"[rank], node="ab"[rank], timeout_s=30.0)
        config = AsyncSaverConfig(
            tier=tier, timeout_s=30.0, start_timeout_s=60.0, orphan_grace_s=1.0
        )
        with AsyncSaver(config=config) as saver:
            for step in range(1, 7):
                place = (run if step in (1, 5) else tier.path) / f"checkpoint-{step}"
                response = async_save(
                    state(rank, world_size, step), checkpoint_id=place, saver=saver
                )
                if step == 3 and rank == 1:
                    os.kill(saver.pid, signal.SIGKILL)
                with suppress(SaveError):  # of the third, and of what it broke
                    response.upload_completion.result(timeout=60)
                while step == 3 and rank == 1 and not saver.saver_ended:
                    time.sleep(0.01)
            report = response.upload_completion.result(timeout=60)
            assert report.path.parent.parent == tier.path
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    outcomes = collect_ranks(fn, 2, timeout_s=300)
    assert outcomes[1].error_type == "Died" and outcomes[0].ok, outcomes
    assert {path.name for path in run.iterdir()} == {"checkpoint-1", "checkpoint-5"}
    assert verify_checkpoint(run / "checkpoint-5").problems == ()
    assert {copy.step for copy in held_copies(memory / "a")} == {6}
    shutil.rmtree(memory / "b")

    def resume(rank: int, world_size: int) -> int:
        found = state(rank, world_size, 0)
        with CheckpointManager(run) as manager, tier_of(memory, ["a", "fresh"][rank]) as tier:
            resume_nearest(manager, tier, lambda place: load(found, checkpoint_id=place))
        right = state(rank, world_size, 6)
        return sum(
            not torch.equal(got.tensor, wanted.tensor)
            for part in right
            for got, wanted in zip(found[part], right[part], strict=True)
        )

    assert run_ranks(resume, 2, timeout_s=240) == [0, 0]


def test_storage_is_read_where_it_is_newer(memory: Path, tmp_path: Path) -> None:
    def fn(rank: int, world_size: int) -> list[int]:
        taken = []
        with CheckpointManager(tmp_path) as manager, tier_of(memory, NAMES[rank]) as tier:
            assert resume_nearest(manager, tier, lambda place: None) is None
            for save_in_tier, step in ((True, 2), (False, 3), (True, 3)):
                (tier if save_in_tier else manager).save(state(rank, world_size, step), step)
                found = state(rank, world_size, 0)
                load_it = lambda place, found=found: load(found, checkpoint_id=place)  # noqa: E731
                place, _ = resume_nearest(manager, tier, load_it)
                taken.append((place.parent == tmp_path, int(found["model"][1].tensor)))
        return taken

    started = time.monotonic()
    for taken in run_ranks(fn, len(NAMES), timeout_s=240):
        assert taken == [(False, 2), (True, 3), (False, 3)], time.monotonic() - started
