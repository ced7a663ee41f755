"""SIGKILL of savers and trainers: never half a checkpoint, never a hang, never an orphan.

Large counts are in `benchmarks/unified_ckpt_kills.py`.
"""

import json
import os
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ranktest import collect_ranks
from unified_ckpt import Shard, load, verify_checkpoint
from unified_ckpt.background.async_saving import async_save
from unified_ckpt.background.config import AsyncSaverConfig
from unified_ckpt.background.saver import AsyncSaver
from unified_ckpt.background.zero_cost import ZeroCostSaver
from unified_ckpt.errors import SaveError

ROWS, COLUMNS = 300, 1000
CONFIG = AsyncSaverConfig(timeout_s=60.0, start_timeout_s=120.0, orphan_grace_s=1.0)


def state(rank: int, world_size: int, value: float) -> dict[str, list[Shard]]:
    rows = Shard.of(
        "rows",
        torch.full((ROWS, COLUMNS), float(value)),
        global_shape=(ROWS * world_size, COLUMNS),
        offset=(ROWS * rank, 0),
    )
    return {"model": [rows], "optimizer": [rows]}


def value_of(checkpoint: Path, world_size: int) -> float:
    """The one value of all elements of both parts; the checkpoint is checked byte for byte."""
    assert verify_checkpoint(checkpoint).problems == ()
    values: set[float] = set()
    for part in ("model", "optimizer"):
        tensor = torch.full((ROWS * world_size, COLUMNS), -1.0)
        whole = Shard.of("rows", tensor, global_shape=tuple(tensor.shape), offset=(0, 0))
        load([whole], checkpoint_id=checkpoint, part=part)
        values |= set(tensor.unique().tolist())
    (value,) = values
    return value


def wait_for_end(saver: AsyncSaver) -> None:
    deadline = time.monotonic() + 20
    while not saver.saver_ended:
        assert time.monotonic() < deadline, "the end of the saver went unnoticed"
        time.sleep(0.005)


def is_gone(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


def saves_with_one_kill(saver: AsyncSaver, folder: Path, rank: int, world_size: int) -> list[str]:
    """Save steps 1 to 4; rank 1's saver is killed while it writes step 2, or just after."""
    outcomes = []
    saver.prepare(state(rank, world_size, 0.0))
    for step in range(1, 5):
        try:
            response = async_save(
                state(rank, world_size, step),
                checkpoint_id=folder / f"checkpoint-{step}",
                saver=saver,
            )
            if step == 2 and rank == 1:
                time.sleep(random.uniform(0.0, 0.1))
                os.kill(saver.pid, signal.SIGKILL)
                wait_for_end(saver)
            response.upload_completion.result(timeout=120)
            outcomes.append("")
        except SaveError as error:
            outcomes.append(str(error))
    return outcomes


def test_killed_savers_and_killed_trainers_leave_whole_checkpoints_and_no_orphan(
    tmp_path: Path,
) -> None:
    """First a saver, which fails one save on all ranks and no later one; then both trainers."""
    run, told = tmp_path / "run", tmp_path / "told"
    told.mkdir()

    def fn(rank: int, world_size: int) -> None:
        saver = AsyncSaver(config=CONFIG)
        outcomes = saves_with_one_kill(saver, run, rank, world_size)
        (told / str(rank)).write_text(json.dumps([saver.pid, outcomes]))
        dist.barrier()
        place = run / "checkpoint-5"
        async_save(state(rank, world_size, 5.0), checkpoint_id=place, saver=saver)
        zero_cost = ZeroCostSaver(saver, num_microbatches=2)
        zero_cost.begin_save(state(rank, world_size, 6.0), checkpoint_id=run / "checkpoint-6")
        zero_cost.offload_chunk()
        time.sleep(random.uniform(0.0, 0.1))
        os.kill(os.getpid(), signal.SIGKILL)

    ended = collect_ranks(fn, 2, timeout_s=300)
    assert [outcome.error_type for outcome in ended] == ["Died", "Died"], ended
    pids, results = zip(*(json.loads((told / str(r)).read_text()) for r in range(2)), strict=True)
    for pid in pids:
        wait_until_gone(pid)
    check_outcomes(results, run)
    assert not (run / "checkpoint-6").exists()  # it was never handed over


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 20
    while not is_gone(pid):
        assert time.monotonic() < deadline, "the saver process outlives its trainer"
        time.sleep(0.02)


def check_outcomes(results: Sequence[Sequence[str]], run: Path) -> None:
    failed = [{step for step, text in enumerate(o, start=1) if text} for o in results]
    # Rank 1 hears of the death at once; rank 0 of what it broke: that save, or the next one.
    assert failed[1] in ({2}, {3}) and failed[0] <= {2, 3}, results
    assert "rank 1: the saver process died" in results[1][min(failed[1]) - 1]
    assert "SIGKILL" in results[1][min(failed[1]) - 1]
    published = {path.name for path in run.iterdir() if not path.name.startswith(".")}
    for step in range(1, 6):
        name = f"checkpoint-{step}"
        if step < 5 and not any(outcomes[step - 1] for outcomes in results):
            assert name in published
        if name in published:
            assert value_of(run / name, 2) == step


def check_saver_kills(saver: AsyncSaver, folder: Path, count: int) -> None:
    """Kill the saver at random moments while it replaces one checkpoint again and again."""
    checkpoint, held, delays = folder / "checkpoint-0", 0.0, []
    for step in range(1, 3 * count, 3):
        async_save(state(0, 1, step), checkpoint_id=checkpoint, saver=saver)
        started = time.perf_counter()
        saver.wait(timeout_s=60)
        took_s, held = time.perf_counter() - started, float(step)
        response = async_save(state(0, 1, step + 1), checkpoint_id=checkpoint, saver=saver)
        delays.append(random.uniform(0.0, 1.2 * took_s))
        time.sleep(delays[-1])
        os.kill(saver.pid, signal.SIGKILL)
        wait_for_end(saver)
        found = value_of(checkpoint, 1)
        error = response.upload_completion.exception(timeout=20)
        assert found == step + 1 or (error is not None and found == held), delays
        if error is None:  # it had finished, so the kill is news to the next call
            with pytest.raises(SaveError, match="SIGKILL"):
                async_save(state(0, 1, 0.0), checkpoint_id=checkpoint, saver=saver)


def test_a_kill_of_a_saver_that_overwrites_leaves_the_old_or_the_new(
    saver: AsyncSaver, tmp_path: Path
) -> None:
    saver.prepare(state(0, 1, 0.0))
    check_saver_kills(saver, tmp_path, 1)
    async_save(state(0, 1, 9.0), checkpoint_id=tmp_path / "checkpoint-0", saver=saver)
    saver.wait(timeout_s=60)
    assert value_of(tmp_path / "checkpoint-0", 1) == 9.0
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-0"]


def test_a_signal_that_is_meant_for_the_trainer_does_not_end_the_saver(
    saver: AsyncSaver, tmp_path: Path
) -> None:
    """A terminal or a cluster sends them to all processes; the trainer then saves once more."""
    pid = saver.pid
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(pid, number)
    async_save(state(0, 1, 1.0), checkpoint_id=tmp_path / "checkpoint-1", saver=saver)
    saver.wait(timeout_s=60)
    assert saver.pid == pid and not saver.saver_ended
    assert value_of(tmp_path / "checkpoint-1", 1) == 1.0


def test_a_stopped_saver_does_not_stop_the_trainer(
    saver: AsyncSaver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver.prepare(state(0, 1, 0.0))
    monkeypatch.setattr(saver, "config", replace(saver.config, backpressure_timeout_s=0.3))
    os.kill(saver.pid, signal.SIGSTOP)
    for step in (1, 2):
        async_save(state(0, 1, step), checkpoint_id=tmp_path / f"checkpoint-{step}", saver=saver)
    with pytest.raises(SaveError, match=r"all 2 staging buffers .* after 0\.3 s"):
        async_save(state(0, 1, 3), checkpoint_id=tmp_path / "checkpoint-3", saver=saver)
    with pytest.raises(SaveError, match=r"2 saves did not end within 0\.1 s"):
        saver.wait(timeout_s=0.1)
    os.kill(saver.pid, signal.SIGCONT)
    saver.wait(timeout_s=60)
    monkeypatch.undo()
    async_save(state(0, 1, 4), checkpoint_id=tmp_path / "checkpoint-4", saver=saver)
    saver.wait(timeout_s=60)
    assert {path.name for path in tmp_path.iterdir()} == {f"checkpoint-{n}" for n in (1, 2, 4)}
    assert value_of(tmp_path / "checkpoint-4", 1) == 4.0
