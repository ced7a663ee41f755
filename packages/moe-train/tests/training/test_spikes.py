"""The guard against steps that would spoil the weights: alone, and in real runs."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from moe_train.checkpoint import read_ledger, read_state
from moe_train.config import Config
from moe_train.jobs.job import check, train
from moe_train.rank import RankContext
from moe_train.report.metrics import read_metrics
from moe_train.training.spikes import LossSpikeError, SpikeGuard
from moe_train.training.step import StepResult, StepRunner
from ranktest import collect_ranks, run_ranks
from unified_ckpt.folders import find_fault

Configure = Callable[..., Config]
GUARD = ("train.loss_spike_threshold=1.5", "train.loss_spike_window=3")


def result(loss: float, *, applied: bool = True) -> StepResult:
    return StepResult(
        loss=loss,
        aux_loss=0.0,
        z_loss=0.0,
        mtp_loss=0.0,
        grad_norm=1.0,
        num_tokens=1,
        load_LE=[],
        stop_requested=False,
        applied=applied,
    )


def test_the_limit_is_a_multiple_of_the_median_of_a_full_window(configure: Configure) -> None:
    guard = SpikeGuard.of(configure(*GUARD))
    for number, loss in enumerate((4.0, 2.0, 9.0, 3.0), 1):
        assert guard.max_loss == (math.inf if number < 4 else 1.5 * 4.0)
        guard.note(result(loss), number)
    assert guard.losses == [2.0, 9.0, 3.0] and guard.max_loss == 1.5 * 3.0
    assert SpikeGuard.of(configure()).max_loss == math.inf


def test_updates_left_out_are_counted_and_too_many_in_a_row_end_the_run(
    configure: Configure, caplog: pytest.LogCaptureFixture
) -> None:
    config = configure(*GUARD, "train.on_loss_spike=skip", "train.max_skipped_steps=2")
    guard = SpikeGuard.of(config, (1.0, 1.0, 1.0))
    for step, applied in enumerate((False, False, True, False, False), 1):
        guard.note(result(7.0 if not applied else 1.0, applied=applied), step)
    assert (guard.skipped, guard.skips_in_row, guard.losses) == (4, 2, [1.0, 1.0, 1.0])
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 4 and lines[1] == (
        "step 2: loss=7 is above train.loss_spike_threshold=1.5 times the median of the last 3 "
        "losses (1); its update is left out, the 2. in a row of at most 2"
    )
    with pytest.raises(LossSpikeError, match=r"^step 6: .* after 2 updates left out$"):
        guard.note(result(7.0, applied=False), 6)


def spiked(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    """Make the losses of these steps high, as all ranks see them, and leave the gradients alone."""
    share = StepRunner._share
    count = {"step": 0}

    def high(self: StepRunner, *arguments: object) -> StepResult:
        told = share(self, *arguments)  # type: ignore[arg-type]
        count["step"] += 1
        bad = count["step"] + FIRST["step"] in steps
        return dataclasses.replace(told, loss=told.loss * 4) if bad else told

    monkeypatch.setattr(StepRunner, "_share", high)


FIRST = {"step": 0}


def run(config: Config, resume: str = "", first: int = 0) -> list[str | None]:
    check(config, resume)
    FIRST["step"] = first
    ranks = collect_ranks(lambda *_: train(config, resume, RankContext()), config.world_size)
    return [outcome.error for outcome in ranks]


def lines(folder: Path) -> dict[int, dict[str, object]]:
    found = read_metrics(folder / "metrics.jsonl")
    timed = {"tokens_per_s", "step_time_s", "save_stall_s", "data_time_s", "data_wait_fraction"}
    return {
        line["step"]: {k: v for k, v in line.items() if k not in timed}
        for line in found
        if "loss" in line
    }


@pytest.mark.parametrize("layout", [(), ("parallel.ep=2",)])
def test_a_spike_is_left_out_its_samples_are_used_up_and_a_resumed_run_decides_alike(
    configure: Configure,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    layout: tuple[str, ...],
) -> None:
    spiked(monkeypatch, {4, 6})
    job = (*GUARD, *layout, "train.on_loss_spike=skip", "train.max_steps=7")
    job = (*job, "checkpoint.interval_steps=1", "checkpoint.save_total_limit=9")
    whole = configure(*job, f"train.output_dir={tmp_path / 'whole'}")
    assert run(whole) == [None] * whole.world_size
    states = {n: read_state(tmp_path / "whole" / f"checkpoint-{n}") for n in (3, 4, 6, 7)}
    assert [s.skipped_steps for s in states.values()] == [0, 1, 2, 2]
    assert [s.skips_in_row for s in states.values()] == [0, 1, 1, 0]
    ledger = read_ledger(tmp_path / "whole" / "checkpoint-7")
    assert [segment.skipped for segment in ledger.segments] == [[4, 6]]
    assert states[4].consumed_samples == 48 and states[4].recent_losses == states[3].recent_losses
    told = lines(tmp_path / "whole")
    assert [told[n].get("skipped_steps") for n in (3, 4, 5, 6, 7)] == [None, 1, 1, 2, 2]
    parts = configure(*job, f"train.output_dir={tmp_path / 'parts'}")
    for first in (4,) if layout else (4, 5):  # right behind a spike, and between two
        source = str(tmp_path / "whole" / f"checkpoint-{first}")
        assert run(parts, source, first) == [None] * whole.world_size
        again = lines(tmp_path / "parts")
        assert {n: again[n] for n in again if n > first} == {
            n: told[n] for n in told if n > first
        }, "bit for bit"
        for path in (tmp_path / "parts").glob("checkpoint-*"):
            assert read_state(path) == read_state(tmp_path / "whole" / path.name)


def test_an_update_left_out_changes_neither_weights_nor_moments(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spiked(monkeypatch, {4})
    job = (*GUARD, "train.on_loss_spike=skip", "checkpoint.interval_steps=1")
    job = (*job, "checkpoint.save_total_limit=9", "train.max_steps=5")
    assert run(configure(*job)) == [None]
    files = {}
    for step in (3, 4, 5):
        for name in ("model", "optimizer"):
            path = tmp_path / "run" / f"checkpoint-{step}" / f"{name}.safetensors"
            files[step, name] = path.read_bytes()
    for name in ("model", "optimizer"):
        assert files[3, name] == files[4, name] != files[5, name]


def test_a_spike_stops_the_run_with_the_state_before_it(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spiked(monkeypatch, {5})
    config = configure(*GUARD, "parallel.dp=2", "train.max_steps=7")
    for error in run(config):
        assert error is not None and "LossSpikeError: step 5: loss=" in error
        assert f"the state before it is saved as {tmp_path}/run/checkpoint-4" in error
    source = tmp_path / "run" / "checkpoint-4"
    assert find_fault(source) is None and read_state(source).consumed_samples == 48
    assert list(lines(tmp_path / "run")) == [1, 2, 3, 4]
    monkeypatch.undo()
    check(config, "latest")
    run_ranks(lambda *_: train(config, "latest", RankContext()), 2)
    assert list(lines(tmp_path / "run")) == [1, 2, 3, 4, 5, 6, 7]
