import math
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from ranktest import run_ranks
from unified_ckpt import LoadError, SaveError, SavePeerError, Shard, load
from unified_ckpt.commit import hidden_name
from unified_ckpt.errors import DamagedCheckpointWarning
from unified_ckpt.manager import (
    CheckpointManager,
    ManagerOptions,
    best_of,
    due_by_steps,
    encode_metrics,
)

QUIET = ManagerOptions(signals=())


def shards(value: float, rank: int = 0, world_size: int = 1) -> dict[str, list[Shard]]:
    tensor = torch.full((3,), float(value))
    return {
        "model": [Shard(key="w", tensor=tensor, global_shape=(3 * world_size,), offset=(3 * rank,))]
    }


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def test_steps_are_due_by_their_multiple() -> None:
    assert [s for s in range(9) if due_by_steps(s, 4)] == [4, 8]
    assert not due_by_steps(4, None)


def test_the_best_is_the_first_of_the_least_or_greatest_and_never_nan() -> None:
    values = {Path("a"): 2.0, Path("b"): math.nan, Path("c"): None, Path("d"): 1.0, Path("e"): 1.0}
    assert best_of(values, "min") == Path("d")
    assert best_of(values, "max") == Path("a")
    assert best_of({Path("b"): math.nan}, "min") is None


def test_old_checkpoints_go_after_the_new_one_is_there_and_the_best_stays(tmp_path: Path) -> None:
    options = ManagerOptions(save_total_limit=2, best_metric="loss", signals=())
    with CheckpointManager(tmp_path / "run", options) as manager:
        for step, loss in ((1, 3.0), (2, 0.5), (3, 2.0), (4, math.nan), (5, 2.5)):
            manager.save(shards(step), step, metrics={"loss": loss})
        assert names(tmp_path / "run") == ["checkpoint-2", "checkpoint-4", "checkpoint-5"]
        assert manager.best() == manager.path(2)
    with CheckpointManager(tmp_path / "run", options) as manager:  # another job knows it as well
        assert manager.best() == manager.path(2)


def test_a_save_that_fails_removes_nothing(tmp_path: Path) -> None:
    options = ManagerOptions(save_total_limit=1, signals=())
    with CheckpointManager(tmp_path, options) as manager:
        manager.save(shards(1), 1)
        with pytest.raises(SaveError):
            manager.save({"model": [*shards(2)["model"], *shards(3)["model"][:0], 7]}, 2)
        with pytest.raises(SaveError, match="checkpoint-2 is not complete"):
            manager.committed(2)
        assert names(tmp_path) == ["checkpoint-1"]


def test_the_checkpoint_just_saved_stays_below_a_higher_number(tmp_path: Path) -> None:
    options = ManagerOptions(save_total_limit=1, signals=())
    with CheckpointManager(tmp_path, options) as manager:
        manager.save(shards(9), 9)
        manager.save(shards(4), 4)
        assert names(tmp_path) == ["checkpoint-4", "checkpoint-9"]


def test_leftovers_are_cleaned_at_start_and_a_second_manager_is_refused(tmp_path: Path) -> None:
    hidden_name(tmp_path / "checkpoint-1", "tmp").mkdir()
    with CheckpointManager(tmp_path, QUIET):
        assert names(tmp_path) == []
        with pytest.raises(SaveError, match=r"another process manages .* and holds its lock"):
            CheckpointManager(tmp_path, QUIET)
    CheckpointManager(tmp_path, QUIET).close()


def test_resume_falls_back_to_the_newest_valid_one_and_says_so(tmp_path: Path) -> None:
    def fill(path: Path) -> float:
        tensor = torch.zeros(3)
        load([Shard(key="w", tensor=tensor, global_shape=(3,), offset=(0,))], checkpoint_id=path)
        return float(tensor[0])

    with CheckpointManager(tmp_path, QUIET) as manager:
        assert manager.resume(fill) is None
        for step in (1, 2, 3):
            manager.save(shards(step), step)
        assert manager.resume(fill) == (manager.path(3), 3.0)
        (manager.path(3) / "model.safetensors").unlink()
        flip(manager.path(2) / "model.safetensors")
        with pytest.warns(DamagedCheckpointWarning) as caught:
            assert manager.resume(fill) == (manager.path(1), 1.0)
        said = [str(warning.message) for warning in caught]
        assert "checkpoint-3 is passed over" in said[0] and "file is missing" in said[0]
        assert "checkpoint-2 is damaged" in said[1] and "rank 0" in said[1] and "'w'" in said[1]


def test_all_ranks_fall_back_when_one_of_them_finds_damage(tmp_path: Path) -> None:
    def fn(rank: int, world_size: int) -> tuple[str, float, str]:
        def fill(path: Path) -> float:
            wants = shards(0, rank, world_size)["model"]
            load(wants, checkpoint_id=path)
            return float(wants[0].tensor[0])

        with CheckpointManager(tmp_path, QUIET) as manager:
            for step in (1, 2):
                manager.save(shards(10 * step + rank, rank, world_size), step)
            if rank == 0:
                flip(manager.path(2) / "model.safetensors")
            with pytest.warns(DamagedCheckpointWarning) as caught:
                path, value = manager.resume(fill)
            with pytest.raises(LoadError, match=r"rank 1 failed in 'load': ZeroDivisionError"):
                manager.resume(lambda path: 1 // (1 - rank))
        return path.name, value, str(caught[0].message)

    first, second = run_ranks(fn, 2)
    assert (first[:2], second[:2]) == (("checkpoint-1", 10.0), ("checkpoint-1", 11.0))
    assert first[2] == second[2] and "rank 1: " in first[2] and "'w' is damaged" in first[2]


def test_a_signal_on_one_rank_saves_on_all_at_the_same_step(tmp_path: Path) -> None:
    def fn(rank: int, world_size: int) -> list[tuple[bool, bool, tuple[str, ...]]]:
        before = signal.getsignal(signal.SIGTERM)
        with CheckpointManager(tmp_path, ManagerOptions(save_steps=4, timeout_s=20)) as manager:
            decisions = []
            for step in range(1, 6):
                if rank == 1 and step == 2:
                    os.kill(os.getpid(), signal.SIGUSR1)
                if rank == 0 and step == 5:
                    os.kill(os.getpid(), signal.SIGTERM)
                decision = manager.decide(step)
                decisions.append((decision.save, decision.stop, decision.reasons))
        assert signal.getsignal(signal.SIGTERM) == before
        return decisions

    expected = [
        (False, False, ()),
        (True, False, ("signal",)),
        (False, False, ()),
        (True, False, ("steps",)),
        (True, True, ("signal",)),
    ]
    assert run_ranks(fn, 2) == [expected, expected]


def test_minutes_are_those_of_the_first_rank(tmp_path: Path) -> None:
    def fn(rank: int, world_size: int) -> list[bool]:
        options = ManagerOptions(save_minutes=0.3 / 60 if rank == 0 else 1e-9, signals=())
        with CheckpointManager(tmp_path, options) as manager:
            first = manager.decide(1).save
            time.sleep(0.4)
            decision = manager.decide(2)
            manager.save(shards(1, rank, world_size), 2)
            return [first, decision.save, decision.reasons == ("minutes",), manager.decide(3).save]

    assert run_ranks(fn, 2) == [[False, True, True, False]] * 2


def test_a_rank_that_does_not_decide_is_named_in_time(tmp_path: Path) -> None:
    def fn(rank: int, world_size: int) -> str:
        manager = CheckpointManager(tmp_path, ManagerOptions(timeout_s=1.0))
        if rank == 1:
            time.sleep(3.0)
            return ""
        with pytest.raises(SavePeerError) as caught:
            manager.decide(1)
        return str(caught.value)

    said = run_ranks(fn, 2)[0]
    assert (
        said.startswith("rank 0, CheckpointManager(") and "decide(1): waiting in 'decide'" in said
    )


@pytest.mark.parametrize(
    "options", [{"save_steps": 0}, {"save_minutes": -1.0}, {"best_mode": "least"}]
)
def test_wrong_options_are_named(options: dict) -> None:
    (name,) = options
    with pytest.raises(ValueError, match=name):
        ManagerOptions(**options)


def test_a_metric_that_is_no_number_is_refused() -> None:
    with pytest.raises((TypeError, ValueError)):
        encode_metrics(1, {"loss": "low"})
