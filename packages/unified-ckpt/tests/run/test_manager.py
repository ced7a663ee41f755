import errno
import math
import os
import re
import signal
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ranktest import run_ranks
from unified_ckpt import Shard, load, save
from unified_ckpt.errors import (
    DamagedCheckpointWarning,
    LoadError,
    SaveArgumentError,
    SaveError,
    SavePeerError,
)
from unified_ckpt.folders import folder
from unified_ckpt.run import hold, manager
from unified_ckpt.run.manager import CheckpointManager, ManagerOptions, due_by_steps
from unified_ckpt.saving.commit.agreement import Agreement
from unified_ckpt.saving.commit.commit import hidden_name

QUIET = ManagerOptions(signals=())


def shards(value: float, rank: int = 0, world_size: int = 1) -> dict[str, list[Shard]]:
    tensor = torch.full((3,), float(value))
    return {"model": [Shard.of("w", tensor, global_shape=(3 * world_size,), offset=(3 * rank,))]}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def test_steps_are_due_by_their_multiple() -> None:
    assert [s for s in range(9) if due_by_steps(s, 4)] == [4, 8]
    assert not due_by_steps(4, None)


def test_old_checkpoints_go_after_the_new_one_is_there_and_the_best_stays(tmp_path: Path) -> None:
    options = ManagerOptions(save_total_limit=2, best_metric="loss", signals=())
    with CheckpointManager(tmp_path / "run", options) as manager:
        for step, loss in ((1, 3.0), (2, 0.5), (3, 2.0), (4, math.nan), (5, 2.5)):
            manager.save(shards(step), step, metrics={"loss": loss})
        assert names(tmp_path / "run") == ["checkpoint-2", "checkpoint-4", "checkpoint-5"]
        assert manager.best() == manager.path(2)
    with CheckpointManager(tmp_path / "run", options) as manager:  # another job knows it as well
        assert manager.best() == manager.path(2)


def test_a_save_without_metrics_writes_no_file_for_them(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, QUIET) as manager:
        manager.save(shards(1), 1)
        manager.save(shards(2), 2, metrics={})
    assert [(tmp_path / f"checkpoint-{n}" / "metrics.json").exists() for n in (1, 2)] == [
        False,
        True,
    ]


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


def test_leftovers_are_cleaned_at_start_and_a_second_manager_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hold, "_LOCK_WAIT_S", 0.1)
    hidden_name(tmp_path / "checkpoint-1", "tmp").mkdir()
    with CheckpointManager(tmp_path, QUIET):
        assert names(tmp_path) == []
        with pytest.raises(SaveError, match=r"another process manages .* has held its lock"):
            CheckpointManager(tmp_path, QUIET)
    CheckpointManager(tmp_path, QUIET).close()


def test_a_child_that_outlives_the_manager_does_not_keep_the_folder(tmp_path: Path) -> None:
    first = CheckpointManager(tmp_path, QUIET)
    pid = os.fork()
    if pid == 0:  # as a data loader's worker, with a copy of the lock
        time.sleep(60)
        os._exit(0)
    first.close()
    began_s = time.monotonic()
    CheckpointManager(tmp_path, QUIET).close()
    assert time.monotonic() - began_s < 5.0
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_a_manager_waits_for_the_children_of_a_job_that_was_killed(tmp_path: Path) -> None:
    job = os.fork()
    if job == 0:
        CheckpointManager(tmp_path, QUIET)
        if os.fork() == 0:
            time.sleep(0.5)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(job, 0)
    CheckpointManager(tmp_path, QUIET).close()


def test_a_manager_that_cannot_be_made_holds_nothing(tmp_path: Path) -> None:
    said = []

    def fn() -> None:
        with pytest.raises(SaveArgumentError, match="main thread only") as caught:
            CheckpointManager(tmp_path)
        said.append(str(caught.value))

    thread = threading.Thread(target=fn)
    thread.start()
    thread.join()
    assert said
    before = signal.getsignal(signal.SIGTERM)
    (tmp_path / "file").touch()
    with pytest.raises(SaveError, match="rank 0 failed in 'open': "):
        CheckpointManager(tmp_path / "file")
    assert signal.getsignal(signal.SIGTERM) == before
    CheckpointManager(tmp_path).close()


def test_ranks_that_would_save_at_different_steps_are_told_at_once(tmp_path: Path) -> None:
    def fn(rank: int, world_size: int) -> str:
        with pytest.raises(SaveArgumentError) as caught:
            CheckpointManager(tmp_path, ManagerOptions(save_steps=5 * (rank + 1)))
        CheckpointManager(tmp_path).close()
        return str(caught.value)

    first, second = run_ranks(fn, 2)
    assert first == second and "disagree about save_steps: [5, 10]" in first


def test_resume_falls_back_to_the_newest_valid_one_and_says_so(tmp_path: Path) -> None:
    def fill(path: Path) -> float:
        tensor = torch.zeros(3)
        load([Shard.of("w", tensor, global_shape=(3,), offset=(0,))], checkpoint_id=path)
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


def test_resume_looks_at_no_checkpoint_older_than_the_one_that_it_loads(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, QUIET) as opened:
        for step in (1, 2):
            opened.save(shards(step), step)
        (opened.path(1) / "model.safetensors").unlink()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert opened.resume(lambda path: path.name, verify="full") == (
                opened.path(2),
                "checkpoint-2",
            )
        with pytest.raises(ValueError, match="verify='all'"):
            opened.resume(lambda path: path.name, verify="all")


def test_metrics_count_on_the_first_rank_and_a_wrong_one_is_told_to_all(tmp_path: Path) -> None:
    def fn(rank: int, world_size: int) -> str:
        options = ManagerOptions(signals=(), timeout_s=10)
        with CheckpointManager(tmp_path, options) as opened:
            state = shards(1, rank, world_size)
            opened.save(state, 1, metrics={"loss": None if rank else 1.0})
            with pytest.raises(SaveArgumentError) as caught:
                opened.save(state, 2, metrics={"loss": 1.0 if rank else None})
            return str(caught.value)

    first, second = run_ranks(fn, 2)
    assert (
        first == second
        and "rank 0 failed in 'metrics': CheckpointTypeError: metric 'loss'" in first
    )
    assert names(tmp_path) == ["checkpoint-1"]


def test_a_rotation_that_fails_is_told_to_all_ranks_and_the_new_checkpoint_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rename(old: Path, new: Path) -> None:
        raise PermissionError(13, f"cannot rename {old.name}")

    monkeypatch.setattr(folder, "rename", rename)

    def fn(rank: int, world_size: int) -> str:
        options = ManagerOptions(save_total_limit=1, signals=(), timeout_s=10)
        with CheckpointManager(tmp_path, options) as opened:
            opened.save(shards(1, rank, world_size), 1)
            with pytest.raises(SaveError) as caught:
                opened.save(shards(2, rank, world_size), 2)
            return str(caught.value)

    first, second = run_ranks(fn, 2)
    assert first == second and "rank 0 failed in 'rotate': PermissionError" in first
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-2"]


@pytest.mark.parametrize(
    ("step", "files", "message"),
    [
        (-1, {}, "step=-1 is negative"),
        (2.5, {}, "float"),
        (1, {"metrics.json": b""}, "files has 'metrics.json'"),
    ],
)
def test_what_would_be_lost_under_its_name_is_refused(
    step: int, files: dict[str, bytes], message: str, tmp_path: Path
) -> None:
    opened = CheckpointManager(tmp_path, QUIET)
    with opened, pytest.raises(SaveArgumentError, match=message):
        opened.save(shards(1), step, files=files)
    assert names(tmp_path) == []


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


def test_a_signal_to_stop_that_comes_while_ranks_decide_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = Agreement.any_of

    def any_of(self: Agreement, name: str, flags: manager._Ask) -> manager._Ask:
        if manager._Ask.SIGNAL in flags:
            os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGTERM)
        return ask(self, name, flags)

    with CheckpointManager(tmp_path) as opened:
        os.kill(os.getpid(), signal.SIGUSR1)
        monkeypatch.setattr(Agreement, "any_of", any_of)
        first = opened.decide(1)
        monkeypatch.undo()
        assert (first.save, first.stop) == (True, False)
        assert opened.decide(2).stop
        assert not opened.decide(3).save


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


def test_minutes_begin_anew_with_a_decision_since_a_save_in_the_background_takes_time(
    tmp_path: Path,
) -> None:
    options = ManagerOptions(save_minutes=0.2 / 60, signals=())
    with CheckpointManager(tmp_path, options) as opened:
        time.sleep(0.25)
        assert [opened.decide(1).save, opened.decide(2).save] == [True, False]


def test_a_rank_that_does_not_decide_is_named_in_time(tmp_path: Path) -> None:
    def fn(rank: int, world_size: int) -> str:
        manager = CheckpointManager(tmp_path, ManagerOptions(timeout_s=1.0))
        raised = tmp_path / "raised"
        if rank == 1:
            while not raised.exists():
                time.sleep(0.01)
            return ""
        with pytest.raises(SavePeerError) as caught:
            manager.decide(1)
        raised.touch()
        return str(caught.value)

    said = run_ranks(fn, 2)[0]
    assert (
        said.startswith("rank 0, CheckpointManager(") and "decide(1): waiting in 'decide'" in said
    )


@pytest.mark.parametrize(
    "options",
    [
        {"save_steps": 0},
        {"save_minutes": -1.0},
        {"best_mode": "least"},
        {"timeout_s": None},
        {"save_total_limit": 1.5},
    ],
)
def test_wrong_options_are_named(options: dict) -> None:
    (name,) = options
    with pytest.raises((ValueError, TypeError), match=name):
        ManagerOptions(**options)


def test_resume_falls_back_from_a_checkpoint_that_cannot_be_read(tmp_path: Path) -> None:
    """A disk that fails under the loader, links that lead nowhere, and folders of others."""

    def fill(path: Path) -> float:
        if path.name == "checkpoint-4":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if path.name == "checkpoint-1":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        tensor = torch.zeros(3)
        load([Shard.of("w", tensor, global_shape=(3,), offset=(0,))], checkpoint_id=path)
        return float(tensor[0])

    with CheckpointManager(tmp_path, QUIET) as opened:
        for step in (1, 2, 3, 4, 6):
            opened.save(shards(step), step)
        (tmp_path / "checkpoint-5").symlink_to("checkpoint-5")
        (opened.path(6) / "manifest.json").unlink()
        (opened.path(6) / "manifest.json").symlink_to("manifest.json")
        (opened.path(3) / "model.safetensors").unlink()
        os.mkfifo(opened.path(3) / "model.safetensors")
        with pytest.warns(DamagedCheckpointWarning) as caught:
            assert opened.resume(fill) == (opened.path(2), 2.0)
        said = "\n".join(str(warning.message) for warning in caught)
        for reason in (
            "checkpoint-6 is passed over, .*manifest.json: cannot be read: Too many levels",
            "checkpoint-5 is passed over, .*cannot be read: Too many levels",
            "checkpoint-4 is damaged, the next older one is loaded: .*Input/output error",
            "checkpoint-3 is passed over, .*model.safetensors: is not a regular file",
        ):
            assert re.search(reason, said), (reason, said)
        (opened.path(2) / "model.safetensors").unlink()
        with (
            pytest.warns(DamagedCheckpointWarning),
            pytest.raises(LoadError, match=r"No space left on device.* was being loaded"),
        ):
            opened.resume(fill)


def test_resume_takes_the_checkpoint_that_replaced_the_one_it_was_loading(tmp_path: Path) -> None:
    """Rank 1 is slow: meanwhile rank 0 has loaded the old one, and another job saves a new one."""

    def fn(rank: int, world_size: int) -> tuple[str, list[float], list[str]]:
        group = [dist.new_group([r]) for r in range(world_size)][rank]
        seen: list[float] = []

        def fill(path: Path) -> list[float]:
            tensor = torch.zeros(3)
            load([Shard.of("w", tensor, global_shape=(3,), offset=(0,))], checkpoint_id=path)
            seen.append(float(tensor[0]))
            if rank == 1 and len(seen) == 1:
                save(shards(2), checkpoint_id=path, group=group)
            if rank == 1 and len(seen) == 2:  # the other job removes it and has a newer one
                save(shards(3), checkpoint_id=path.with_name("checkpoint-3"), group=group)
                path.rename(hidden_name(path, "tmp"))
            return seen

        with CheckpointManager(tmp_path, QUIET) as opened:
            if rank == 0:
                save(shards(1), checkpoint_id=tmp_path / "checkpoint-2", group=group)
            dist.barrier()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                path, values = opened.resume(fill)
        return path.name, values, [str(warning.message) for warning in caught]

    expected = ("checkpoint-3", [1.0, 2.0, 3.0], [])
    assert run_ranks(fn, 2) == [expected, expected]


def test_a_step_whose_name_is_a_link_is_not_saved_through_it(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, ManagerOptions(save_total_limit=1)) as opened:
        opened.save(shards(1), 1)
        (tmp_path / "checkpoint-2").symlink_to("checkpoint-1")
        for call in (lambda: opened.save(shards(2), 2), lambda: opened.begin(2)):
            with pytest.raises(ValueError, match="checkpoint-2 is a link to checkpoint-1"):
                call()
        opened.save(shards(3), 3)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]
