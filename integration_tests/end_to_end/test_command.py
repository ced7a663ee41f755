"""The `moe-train` command as a person uses it: real launches, real signals, real mistakes."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpu_alloc import load_trace
from gpu_alloc.trace import summarize
from moe_train.cli import main
from moe_train.config import load_config
from unified_ckpt import get_last_checkpoint, verify_checkpoint

COMMAND = str(Path(sys.executable).parent / "moe-train")
FOUR_RANKS = ("parallel.pp=2", "parallel.ep=2", "checkpoint.interval_steps=4")


def run(*arguments: str | Path, timeout_s: float = 600) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=timeout_s
    )


@pytest.fixture
def started() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []

    def start(*arguments: str | Path) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [COMMAND, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def steps_done(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)


def wait_for_step(folder: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 600
    while steps_done(folder) < step:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, f"step {step} was not reached"
        time.sleep(0.02)


def descendants(pid: int) -> list[int]:
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z":
                parents[int(entry.name)] = int(fields[1])
    found = [pid]
    for parent in found:
        found += [child for child, its_parent in parents.items() if its_parent == parent]
    return found[1:]


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    """The rank processes, by what they call themselves."""
    by_rank = {}
    for pid in descendants(process.pid):
        try:
            kind, _, number = Path(f"/proc/{pid}/comm").read_text().partition(" ")
        except OSError:
            continue
        if kind == "rank":
            by_rank[int(number)] = pid
    return [by_rank[rank] for rank in sorted(by_rank)]


def test_train_generate_and_inspect(
    job: Callable[..., Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    two_ranks = ("parallel.pp=2", "checkpoint.interval_steps=4")
    done = run(
        "train", job(), "train.max_steps=6", *two_ranks, "log.plots=true", "log.tensorboard=true"
    )
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "run"
    made = ["metrics.jsonl", "loss.png", "expert_load.png", "schedule.svg", "checkpoint-6"]
    assert {"checkpoint-4", *made} <= {path.name for path in folder.iterdir()}
    assert done.stdout.splitlines()[-6:] == ["results:", *(f"  {folder / name}" for name in made)]
    checkpoint = str(folder / "checkpoint-6")
    assert main(["generate", "--checkpoint", checkpoint, "--prompt", "def ", "--seed", "1"]) == 0
    assert capfd.readouterr().out.startswith("def ")
    assert main(["inspect", checkpoint]) == 0
    assert "step 6" in capfd.readouterr().out
    planned = run("plan", tmp_path / "job.toml", *FOUR_RANKS, "--traces", tmp_path / "traces")
    assert planned.returncode == 0, planned.stderr
    assert planned.stdout.count("rank ") >= 4
    kinds = ("dispatch, a step", "pipeline, a step", "gradients, a step")
    assert all(kind in planned.stdout for kind in kinds)
    traces = [load_trace(path) for path in sorted((tmp_path / "traces").glob("rank-*.jsonl"))]
    assert len(traces) == 4
    phases = [summarize(trace).phase for trace in traces]
    assert all(" of microbatch " in phase for phase in phases), phases


def test_after_kill_9_of_any_rank_the_run_resumes_with_equal_losses(
    job: Callable[..., Path],
    tmp_path: Path,
    started: Callable[..., subprocess.Popen[str]],
    train: Callable[..., None],
    losses: Callable[[Path], dict[int, float]],
) -> None:
    toml, seed = job(), random.randrange(10**6)
    rng = random.Random(seed)
    common = [*FOUR_RANKS, "train.max_steps=16"]
    train(load_config(toml, [*common, f"train.output_dir={tmp_path / 'whole'}"]))
    target = tmp_path / "killed"
    process = started("train", toml, *common, f"train.output_dir={target}")
    wait_for_step(target, rng.randrange(5, 15), process)
    time.sleep(rng.random() * 0.2)
    victim = rng.randrange(4)
    began = time.monotonic()
    pids = ranks_of(process)
    os.kill(pids[victim], signal.SIGKILL)
    output = process.communicate(timeout=300)[0]
    assert process.returncode not in (0, None), (seed, output)
    assert time.monotonic() - began < 55, seed  # not at the limit of the groups, 60 s
    assert f"rank {victim}" in output and "SIGKILL" in output, (seed, output)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()], f"orphans, seed {seed}"
    for folder in target.glob("checkpoint-*"):
        assert not verify_checkpoint(folder).problems, (seed, folder)
    newest, damaged = get_last_checkpoint(target), target / "checkpoint-99"
    assert newest is not None, seed
    shutil.copytree(newest, damaged)
    (damaged / "config.json").write_text("{}")
    again = run("train", toml, *common, f"train.output_dir={target}", "--resume")
    assert again.returncode == 0, (seed, again.stderr)
    # Once, and not by every rank.
    assert again.stderr.count(f"warning: {damaged} is passed over") == 1, again.stderr
    assert "DamagedCheckpointWarning" not in again.stderr
    assert losses(target) == losses(tmp_path / "whole"), seed


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_request_to_stop_saves_and_exits(
    job: Callable[..., Path],
    tmp_path: Path,
    started: Callable[..., subprocess.Popen[str]],
    signum: signal.Signals,
) -> None:
    process = started("train", job(), "parallel.dp=2", "train.max_steps=100000")
    wait_for_step(tmp_path / "run", 3, process)
    pids = ranks_of(process)
    os.killpg(process.pid, signum)
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 128 + signum, output
    (saved,) = (tmp_path / "run").glob("checkpoint-*")
    assert not verify_checkpoint(saved).problems
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert "Traceback" not in output


def test_a_request_to_stop_ends_a_comparison_of_layouts_after_a_step(
    job: Callable[..., Path], started: Callable[..., subprocess.Popen[str]]
) -> None:
    """Which saves nothing, and has steps for hours."""
    asked = ("train.max_steps=1000000", "--steps", "1000000", "--ranks", "2", "--layouts", "2")
    process = started("verify-layouts", job(), "optimizer.decay_steps=1000000", *asked)
    deadline = time.monotonic() + 300
    while not ranks_of(process):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    pids = ranks_of(process)
    os.killpg(process.pid, signal.SIGTERM)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 2, output
    assert "SIGTERM: ending after this step, without a table" in output
    assert "moe-train: stopped before every layout had run" in output and "Traceback" not in output
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_under_torchrun_the_given_ranks_train(
    job: Callable[..., Path], tmp_path: Path, losses: Callable[[Path], dict[int, float]]
) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [
            *torchrun,
            "--nproc-per-node=2",
            "--no-python",
            COMMAND,
            "train",
            str(job()),
            "parallel.dp=2",
            "train.max_steps=2",
        ],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "checkpoint-2" / "trainer_state.json").exists()
    assert len(losses(tmp_path / "run")) == 2


def test_an_output_folder_with_checkpoints_is_not_mixed_with_a_new_run(
    job: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "run" / "checkpoint-7").mkdir(parents=True)
    done = run("train", job())
    assert done.returncode == 2
    assert "--resume" in done.stderr and "Traceback" not in done.stderr


def test_a_damaged_checkpoint_is_named_before_training(
    job: Callable[..., Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    toml = job()
    assert run("train", toml, "train.max_steps=2").returncode == 0
    weights = tmp_path / "run" / "checkpoint-2" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    checkpoint = str(weights.parent)
    for command in (
        ["train", str(toml), "train.max_steps=4", "--resume", checkpoint],
        ["inspect", checkpoint],
        ["generate", "--checkpoint", checkpoint, "--prompt", "x"],
    ):
        assert main(command) == 2, command
        stderr = capfd.readouterr().err
        assert "model.safetensors" in stderr and "Traceback" not in stderr


def test_a_full_disk_ends_the_run_with_the_last_checkpoint_intact(
    job: Callable[..., Path], tmp_path: Path
) -> None:
    """A small tmpfs is the full disk; without the right to mount one, the file size limit is."""
    toml, disk = job(), tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]
    mounted = shutil.which("mount") and subprocess.run(mount, capture_output=True).returncode == 0
    common = [
        "train.max_steps=40",
        "checkpoint.interval_steps=1",
        "checkpoint.save_total_limit=100",
        f"train.output_dir={disk}",
    ]
    limit = [] if mounted else ["prlimit", "--fsize=20000", "--"]
    try:
        done = subprocess.run(
            [*limit, COMMAND, "train", str(toml), *common],
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode != 0
        assert "space" in done.stderr or "too large" in done.stderr.lower(), done.stderr
        saved = sorted(disk.glob("checkpoint-*"))
        assert saved or not mounted
        for folder in saved:
            assert not verify_checkpoint(folder).problems
    finally:
        if mounted:
            subprocess.run(["umount", str(disk)], check=True)
