"""Checkpoints that cannot be written: real limits and real full file systems."""

import json
import logging
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moe_train.checkpoint import read_state
from moe_train.config import Config
from moe_train.jobs.job import check, train
from moe_train.jobs.space import checkpoint_bytes
from moe_train.rank import RankContext
from moe_train.report.metrics import read_metrics
from moe_train.training import read_model_config
from ranktest import collect_ranks, run_ranks
from unified_ckpt.folders import find_fault

Configure = Callable[..., Config]
StepHook = Callable[[Callable[[int], None]], RankContext]
EACH_STEP = ("checkpoint.interval_steps=1", "checkpoint.save_total_limit=1")


def limit_files(num_bytes: int) -> None:
    """The largest file that this process may write; Python ignores the signal, writes fail."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))


def losses_in(folder: Path) -> dict[int, float]:
    lines = read_metrics(folder / "metrics.jsonl")
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.is_dir()}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_write_costs_a_line_and_no_step(
    configure: Configure, tmp_path: Path, rank: int, step_hook: StepHook
) -> None:
    """Saves 2 and 3 fail on one rank of two; those of before and after are there."""
    config = configure("parallel.ep=2", "train.max_steps=5", *EACH_STEP)
    check(config, "")

    def run(own: int, _: int) -> tuple[list[str], set[str]]:
        records: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("moe_train").addHandler(handler)
        seen: list[set[str]] = []

        def hook(step: int) -> None:
            if step in (2, 4) and own == rank:
                limit_files(20_000 if step == 2 else resource.RLIM_INFINITY)
            if step == 4:
                seen.append(names_in(tmp_path / "run"))

        train(config, "", step_hook(hook))
        return [line for line in records if "not saved" in line], seen[0]

    (said, kept), (other, _) = run_ranks(run, 2)  # type: ignore[misc]
    assert kept == {"checkpoint-1"}, "nothing older left, and no piece of the failed ones"
    assert len(said) == 2 and other == [], "one line for a failed save, not one of each rank"
    for step, line in zip((2, 3), said, strict=True):
        assert f"checkpoint-{step} was not saved in {tmp_path}/run (" in line and "\n" not in line
        assert f"rank {rank} failed in 'write'" in line and "File too large" in line
        assert line.endswith("training goes on, the next save tries again")
    assert list(losses_in(tmp_path / "run")) == [1, 2, 3, 4, 5]
    assert names_in(tmp_path / "run") == {"checkpoint-5"}
    assert find_fault(tmp_path / "run" / "checkpoint-5") is None


def test_an_end_that_is_not_saved_is_an_error_after_everything_is_reported(
    configure: Configure, tmp_path: Path, capfd: pytest.CaptureFixture[str], step_hook: StepHook
) -> None:
    config = configure("parallel.dp=2", "train.max_steps=3", *EACH_STEP)
    check(config, "")

    def run(rank: int, _: int) -> None:
        train(config, "", step_hook(lambda step: limit_files(20_000) if step == 3 else None))

    outcomes = collect_ranks(run, 2)
    for outcome in outcomes:
        assert outcome.error is not None and "NotSavedError: checkpoint-3 " in outcome.error
        assert f"the last checkpoint is {tmp_path}/run/checkpoint-2" in outcome.error
    assert list(losses_in(tmp_path / "run")) == [1, 2, 3]
    assert "results:" in capfd.readouterr().out
    assert names_in(tmp_path / "run") == {"checkpoint-2"}


def test_a_failed_save_ends_the_run_where_that_is_asked(
    configure: Configure, tmp_path: Path, step_hook: StepHook
) -> None:
    config = configure("train.max_steps=4", *EACH_STEP, "checkpoint.stop_on_save_error=true")
    check(config, "")

    def run(*_: int) -> None:
        train(config, "", step_hook(lambda step: limit_files(20_000) if step == 2 else None))

    (outcome,) = collect_ranks(run, 1)
    assert outcome.error is not None and "CheckpointNotSavedError: checkpoint-2 " in outcome.error
    assert list(losses_in(tmp_path / "run")) == [1, 2]
    assert names_in(tmp_path / "run") == {"checkpoint-1"}


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """`mounted(num_bytes)`: a file system of that size, or of another size if called again."""
    place = tmp_path / "disk"
    place.mkdir()

    def mount(num_bytes: int) -> Path:
        options = f"size={num_bytes}" + (",remount" if place.is_mount() else "")
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
        if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("file systems cannot be mounted here")
        return place

    yield mount
    if place.is_mount():
        subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_keeps_what_is_there_and_the_run_goes_on_when_it_has_room(
    configure: Configure, mounted: Callable[[int], Path]
) -> None:
    wide = {"moe_intermediate_size": 256}  # so that tensors are what fills the disk
    one = checkpoint_bytes(configure(**wide), read_model_config(configure(**wide)))
    folder = mounted(int(1.4 * one)) / "run"
    config = configure("parallel.ep=2", f"train.output_dir={folder}", *EACH_STEP, **wide)
    check(config, "")

    def run(*_: int) -> None:
        train(config, "", RankContext())

    for outcome in collect_ranks(run, 2):
        assert outcome.error is not None and "NotSavedError: checkpoint-4 " in outcome.error
        assert "the checkpoint needs " in outcome.error and " are missing; " in outcome.error
    assert names_in(folder) == {"checkpoint-1"} and find_fault(folder / "checkpoint-1") is None
    assert list(losses_in(folder)) == [1, 2, 3, 4]
    before = losses_in(folder)
    mounted(4 * one)
    check(config, "latest")
    run_ranks(lambda *_: train(config, "latest", RankContext()), 2)
    assert names_in(folder) == {"checkpoint-4"}
    assert losses_in(folder) == before, "bit for bit"


def test_a_disk_without_room_for_one_checkpoint_is_refused_before_the_run(
    configure: Configure, mounted: Callable[[int], Path]
) -> None:
    one = checkpoint_bytes(configure(), read_model_config(configure()))
    folder = mounted(one // 2) / "run"
    said = rf"^train\.output_dir={folder} has \d+ bytes free, .*{one}"
    with pytest.raises(ValueError, match=said):
        check(configure(f"train.output_dir={folder}"), "")


@pytest.mark.parametrize(
    "dtype",
    [
        (),
        ("train.dtype=bfloat16",),
        ("train.dtype=bfloat16", "train.stochastic_rounding=true"),
        ("train.dtype=bfloat16", "train.master_weights=true"),
        ("train.dtype=bfloat16", "train.master_weights=true", "checkpoint.moments=int8"),
    ],
)
def test_the_size_of_a_checkpoint_is_known_before_there_is_one(
    configure: Configure, tmp_path: Path, dtype: tuple[str, ...]
) -> None:
    config = configure("train.max_steps=1", *dtype)
    check(config, "")
    run_ranks(lambda *_: train(config, "", RankContext()), 1)
    files = (tmp_path / "run" / "checkpoint-1").glob("*.safetensors")
    tensors = sum(path.stat().st_size for path in files if "random" not in path.name)
    told = checkpoint_bytes(config, read_model_config(config)) - 2**20
    assert 0.9 * tensors < told <= tensors


def test_room_for_fewer_checkpoints_than_are_kept_is_a_line(
    configure: Configure, mounted: Callable[[int], Path], caplog: pytest.LogCaptureFixture
) -> None:
    one = checkpoint_bytes(configure(), read_model_config(configure()))
    folder = mounted(int(2.5 * one)) / "run"
    check(configure(f"train.output_dir={folder}", "checkpoint.save_total_limit=5"), "")
    (line,) = [r.getMessage() for r in caplog.records if "has room for" in r.getMessage()]
    assert "has room for 2 more checkpoints" in line and "up to 6 are there at a time" in line


def test_the_clock_asks_for_a_save_on_every_rank_alike(
    configure: Configure, tmp_path: Path
) -> None:
    config = configure(
        "parallel.dp=2", "checkpoint.interval_minutes=1e-9", "checkpoint.save_total_limit=9"
    )
    check(config, "")
    run_ranks(lambda *_: train(config, "", RankContext()), 2)
    assert names_in(tmp_path / "run") == {f"checkpoint-{step}" for step in (1, 2, 3, 4)}
    never = configure("checkpoint.interval_minutes=inf", f"train.output_dir={tmp_path / 'never'}")
    check(never, "")
    run_ranks(lambda *_: train(never, "", RankContext()), 1)
    assert names_in(tmp_path / "never") == {"checkpoint-4"}
    assert configure().checkpoint.interval_minutes == 30


def test_a_state_before_a_bad_step_leaves_older_checkpoints(
    configure: Configure, tmp_path: Path
) -> None:
    config = configure("optimizer.lr=1e30", "train.max_steps=9", "checkpoint.save_total_limit=1")
    check(config, "")
    (outcome,) = collect_ranks(lambda *_: train(config, "", RankContext()), 1)
    assert outcome.error is not None and "NonFiniteLossError" in outcome.error
    source = tmp_path / "run" / "checkpoint-1"
    assert f"the state before it is saved as {source}" in outcome.error
    assert read_state(source).consumed_samples == 12
    state = json.loads((source / "trainer_state.json").read_text())
    assert state["schedule"]["lr"] == 1e30
