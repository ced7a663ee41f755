"""Checkpoints written beside training, with real saver processes: the same bits as saves that
training waits for, a moving average that equals its own recurrence, and savers that are killed.
"""

import logging
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from gpu_alloc.torch import TraceRecorder
from gpu_alloc.trace import summarize
from moe_train.checkpoint import BackgroundSaves, read_state
from moe_train.config import OWN_TOML, Config
from moe_train.errors import CheckpointNotSavedError
from moe_train.jobs.job import check, train
from moe_train.rank import RankContext
from moe_train.report.metrics import read_metrics
from moe_train.training.beside import SavesBeside
from ranktest import run_ranks
from ranktest.memory import growth_bytes
from unified_ckpt import AsyncSaverConfig, diff_checkpoints
from unified_ckpt.folders import find_fault

Configure = Callable[..., Config]
StepHook = Callable[[Callable[[int], None]], RankContext]
ALL = ("checkpoint.interval_steps=1", "checkpoint.save_total_limit=9")
DECAY = 0.75
START_S = 400.0  # processes start during these tests, and import torch


def run(config: Config, num_ranks: int, resume: str = "") -> None:
    check(config, resume)
    run_ranks(lambda *_: train(config, resume, RankContext()), num_ranks, timeout_s=START_S)


def part(folder: Path, name: str) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob(f"{name}*.safetensors"))
    return {key: tensor for file in files for key, tensor in load_file(file).items()}


def saver_pid() -> int:
    """The saver process of this rank."""
    found = subprocess.run(
        ["pgrep", "-P", str(os.getpid()), "-f", "unified_ckpt.saver_process"],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(found.stdout.split()[0])


@pytest.mark.parametrize(("mode", "moments"), [("async", "exact"), ("zero_cost", "int8")])
def test_every_checkpoint_has_the_bits_of_one_that_training_waited_for(
    configure: Configure, tmp_path: Path, mode: str, moments: str
) -> None:
    """A change of the layout comes while the second checkpoint is on its way."""
    masters = ("train.dtype=bfloat16", "train.master_weights=true", "parallel.pp=2", *ALL)
    masters += (f"checkpoint.moments={moments}", 'parallel.relayout=["2: ep=2"]')
    run(configure(*masters, f"train.output_dir={tmp_path / 'sync'}"), 2)
    run(configure(*masters, f"checkpoint.save_mode={mode}"), 2)
    for step in (1, 2, 3, 4):
        waited, beside = (tmp_path / run / f"checkpoint-{step}" for run in ("sync", "run"))
        assert find_fault(beside) is None
        apart = {each.name for each in diff_checkpoints(waited, beside)}
        random = {f"random_state-{rank:05d}.json" for rank in (0, 1)}  # Python seeds it at a fork
        assert apart - random == {OWN_TOML}, "which names save_mode and output_dir"
        assert read_state(beside) == read_state(waited)
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    stalls = {line["step"]: line["save_stall_s"] for line in lines if "save_stall_s" in line}
    assert stalls.keys() >= {2, 3, 4} and all(stall > 0 for stall in stalls.values())


def test_the_average_is_its_own_recurrence_and_outlives_changes_of_the_layout_and_a_resume(
    configure: Configure, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked = ("checkpoint.save_mode=zero_cost", f"checkpoint.ema_decay={DECAY}", *ALL)
    first = configure("parallel.ep=2", "train.max_steps=3", 'parallel.relayout=["2: dp=2"]', *asked)
    run(first, 2)
    then = ("parallel.pp=2", "train.max_steps=6", 'parallel.relayout=["4: ep=2 experts=1,5"]')
    run(configure(*then, *asked), 2, resume="latest")
    folder = tmp_path / "run"
    average: dict[str, torch.Tensor] = {}
    for step in range(1, 7):
        weights = part(folder / f"checkpoint-{step}", "model")
        for key, weight in weights.items():
            old = average.setdefault(key, weight)
            average[key] = old + (1 - DECAY) * (weight - old) if step > 1 else weight
        kept = part(folder / f"checkpoint-{step}", "ema")
        assert kept.keys() == weights.keys()
        assert all(torch.equal(kept[key], average[key]) for key in kept), f"step {step}"


def test_updates_of_the_average_do_not_depend_on_when_checkpoints_are_written(
    configure: Configure, tmp_path: Path
) -> None:
    asked = (
        "checkpoint.save_mode=zero_cost",
        f"checkpoint.ema_decay={DECAY}",
        "checkpoint.ema_interval_steps=2",
        "train.max_steps=5",
    )
    run(configure(*asked, *ALL), 1)
    seldom = configure(*asked, f"train.output_dir={tmp_path / 'seldom'}")
    run(seldom, 1)
    often, once = (part(tmp_path / run / "checkpoint-5", "ema") for run in ("run", "seldom"))
    weights = [part(tmp_path / "run" / f"checkpoint-{step}", "model") for step in (2, 4)]
    for key, first in weights[0].items():
        expected = first + (1 - DECAY) * (weights[1][key] - first)
        assert torch.equal(often[key], expected) and torch.equal(once[key], expected)


def test_an_average_that_is_not_continued_or_begins_late_is_a_line(
    configure: Configure, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = ("checkpoint.save_mode=zero_cost", "checkpoint.ema_decay=0.5")
    said: list[str] = []
    for steps, more, resume in ((1, (), ""), (2, kept, "latest"), (3, (), "latest")):
        config = configure(f"train.max_steps={steps}", *more)
        check(config, resume)
        records = run_ranks(lambda *_: _lines(config, resume), 1)[0]  # noqa: B023 - runs at once
        said += [line for line in records if "moving average" in line]
    assert len(said) == 2
    assert "checkpoint-1 holds no moving average, so it begins with step 2" in said[0]
    assert "checkpoint-2 holds a moving average, which is not continued" in said[1]


def test_an_average_of_another_part_begins_anew_with_a_line(configure: Configure) -> None:
    """That of master weights lacks what is not trained, which one of the weights has."""
    kept = ("checkpoint.save_mode=zero_cost", "checkpoint.ema_decay=0.5")
    low = configure(*kept, "train.max_steps=1", "train.dtype=bfloat16", "train.master_weights=true")
    check(low, "")
    run_ranks(lambda *_: _lines(low, ""), 1)
    config = configure(*kept, "train.max_steps=2")
    check(config, "latest")
    (line,) = (x for x in run_ranks(lambda *_: _lines(config, "latest"), 1)[0] if "average" in x)
    assert "is one of its master_weights, and this job would average its model" in line
    assert line.endswith("the average begins with step 2")


def _lines(config: Config, resume: str) -> list[str]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("moe_train").addHandler(handler)
    train(config, resume, RankContext())
    return records


@pytest.mark.parametrize("stops", [False, True])
def test_a_killed_saver_costs_its_checkpoint_and_a_line_or_ends_the_run_where_that_is_asked(
    configure: Configure, tmp_path: Path, step_hook: StepHook, stops: bool
) -> None:
    config = configure(
        "parallel.dp=2",
        "checkpoint.save_mode=async",
        f"checkpoint.stop_on_save_error={str(stops).lower()}",
        "train.max_steps=8",
        *ALL,
    )
    check(config, "")

    def kill(rank: int, _: int) -> str:
        def hook(step: int) -> None:
            if step == 4 and rank == 1:
                os.kill(saver_pid(), signal.SIGKILL)

        try:
            train(config, "", step_hook(hook))
        except CheckpointNotSavedError as error:
            dist.barrier()  # a launcher ends all ranks; here the first holds the savers' store
            return str(error)
        return ""

    errors = run_ranks(kill, 2, timeout_s=START_S)
    there = {path.name for path in (tmp_path / "run").glob("checkpoint-*")}
    assert all(find_fault(tmp_path / "run" / name) is None for name in there)
    if stops:
        assert all("was not saved in " in error and "saver" in error for error in errors)
        assert "checkpoint-8" not in there
    else:
        assert errors == ["", ""]
        assert "checkpoint-8" in there and "checkpoint-4" not in there


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("checkpoint.ema_decay=0.9",), 'set checkpoint.save_mode="zero_cost"'),
        (
            ("checkpoint.ema_decay=0.9", "checkpoint.save_mode=async"),
            'set checkpoint.save_mode="zero_cost"',
        ),
        (
            (
                "checkpoint.ema_decay=0.9",
                "checkpoint.save_mode=zero_cost",
                "checkpoint.node_folder=/dev/shm",
            ),
            "hold no moving average",
        ),
        (
            ("checkpoint.node_folder=/dev/shm", 'parallel.relayout=["2: dp=1"]'),
            "the layout cannot change with checkpoint.node_folder",
        ),
        (("checkpoint.save_mode=later",), 'must be one of "sync", "async", "zero_cost"'),
        (("checkpoint.ema_decay=1",), "is too large"),
    ],
)
def test_what_cannot_be_kept_beside_training_is_refused(
    configure: Configure, changes: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        configure(*changes)


def test_removals_are_made_beside_training_one_after_another() -> None:
    background = BackgroundSaves(settings=AsyncSaverConfig(), zero_cost=False, num_microbatches=1)
    go_on, done = threading.Event(), []

    def first() -> None:
        go_on.wait(START_S)
        done.append("first")

    background.remove(first)
    background.remove(lambda: done.append("second"))
    background.start_removals()
    assert list(background.outcomes()) == [] and done == []
    go_on.set()
    background.close()
    assert done == ["first", "second"]
    background.remove(lambda: done[3])  # what fails is not swallowed
    with pytest.raises(IndexError):
        background.finish_removals()


def test_no_removal_begins_before_a_copy_but_behind_it(tmp_path: Path) -> None:
    background = BackgroundSaves(settings=AsyncSaverConfig(), zero_cost=False, num_microbatches=1)
    beside, begun = SavesBeside(None, background), threading.Event()  # type: ignore[arg-type]
    background.remove(begun.set)
    beside.outcomes(copies_next=True)
    assert not begun.wait(0.2)
    beside.outcomes()
    assert begun.wait(START_S)
    background.close()


def test_saves_in_pieces_take_two_buffers_of_the_state_and_no_other_memory(
    configure: Configure, tmp_path: Path
) -> None:
    found = {}
    for mode in ("sync", "zero_cost"):
        output = f"train.output_dir={tmp_path / mode}"
        asked = ("train.max_steps=2", "checkpoint.interval_steps=1", output)
        config = configure(*asked, f"checkpoint.save_mode={mode}", hidden_size=512, vocab_size=8000)
        check(config, "")
        found[mode] = run_ranks(lambda *_: _peaks(config), 1)[0]  # noqa: B023 - runs at once
    files = (tmp_path / "sync" / "checkpoint-2").glob("*.safetensors")
    state = sum(file.stat().st_size for file in files)
    (storages, process), (storages_beside, process_beside) = found["sync"], found["zero_cost"]
    assert state > 100e6
    assert storages_beside == pytest.approx(storages, rel=1e-3)
    assert process_beside - process <= 2.1 * state


def _peaks(config: Config) -> tuple[int, int]:
    """The most bytes that a rank's storages had at once in training, and that all of it grew by."""
    with TraceRecorder() as recorder:
        grown = growth_bytes(lambda: train(config, "", RankContext()))
    return summarize(recorder.events).peak_live_bytes, grown
