"""`srun -n 4 moe-train train` as one job: four plain processes with the variables of srun."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moe_train.cli import main
from moe_train.config import load_config

COMMAND = str(Path(sys.executable).parent / "moe-train")
FOUR_RANKS = ("parallel.pp=2", "parallel.ep=2", "train.max_steps=4")
Tasks = Callable[..., list["subprocess.Popen[str]"]]


def slurm(task: int, tasks: int, job: int) -> dict[str, str]:
    """What srun sets for one of `tasks` on this machine."""
    values = {
        "SLURM_JOB_ID": job,
        "SLURM_STEP_ID": 0,
        "SLURM_PROCID": task,
        "SLURM_LOCALID": task,
        "SLURM_NODEID": 0,
        "SLURM_NTASKS": tasks,
        "SLURM_STEP_NUM_TASKS": tasks,
        "SLURM_STEP_TASKS_PER_NODE": tasks,
        "SLURM_STEP_NODELIST": "node[07]",
    }
    return {name: str(value) for name, value in values.items()}


@pytest.fixture
def srun() -> Iterator[Tasks]:
    """`srun(4, "train", ...)` starts four tasks; none is left."""
    processes: list[subprocess.Popen[str]] = []

    def start(tasks: int, *arguments: object) -> list["subprocess.Popen[str]"]:
        for task in range(tasks):
            processes.append(
                subprocess.Popen(
                    [COMMAND, *map(str, arguments)],
                    env={**os.environ, **slurm(task, tasks, os.getpid()), "OMP_NUM_THREADS": "1"},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        return processes[-tasks:]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def run_json(folder: Path) -> list[dict[str, object]]:
    return list(json.loads((folder / "run.json").read_text())["starts"])


def test_four_tasks_are_one_job_with_the_losses_of_a_local_launch(
    job: Callable[..., Path],
    tmp_path: Path,
    srun: Tasks,
    train: Callable[..., None],
    losses: Callable[[Path], dict[int, float]],
) -> None:
    toml, local = job(), tmp_path / "local"
    train(load_config(toml, [*FOUR_RANKS, f"train.output_dir={local}"]))
    ended = [
        (*p.communicate(timeout=180), p.returncode) for p in srun(4, "train", toml, *FOUR_RANKS)
    ]
    assert [code for _, _, code in ended] == [0] * 4, ended
    assert [out.count("results:") for out, _, _ in ended] == [1, 0, 0, 0]
    said = [err.splitlines() for _, err, _ in ended]
    assert said[1:] == [[]] * 3
    for text in ("joining 4 ranks", "building the model", "step 1 begins; the first one"):
        assert len([line for line in said[0] if line.startswith(text)]) >= 1, said[0]
    assert losses(tmp_path / "run") == losses(local)
    assert len(losses(local)) == 4
    (entry,) = run_json(tmp_path / "run")
    assert (entry["exit_reason"], entry["last_step"]) == ("finished", 4)
    assert entry["final_loss"] == losses(local)[4]


def test_tasks_that_do_not_fit_the_layout_are_one_line_and_leave_nothing(
    job: Callable[..., Path], tmp_path: Path, srun: Tasks
) -> None:
    ended = [
        (*p.communicate(timeout=180), p.returncode) for p in srun(3, "train", job(), *FOUR_RANKS)
    ]
    assert [(out, code) for out, _, code in ended] == [("", 2)] * 3
    assert [err for _, err, _ in ended] == [
        "moe-train: WORLD_SIZE=3 ranks were started by srun, but parallel.pp=2 * parallel.dp=1 * "
        "parallel.ep=2 = 4; start 4 ranks (srun -n 4) or change [parallel]\n",
        "",
        "",
    ]
    assert not (tmp_path / "run").exists()


def test_a_signal_to_all_tasks_saves_and_a_second_start_goes_on(
    job: Callable[..., Path], tmp_path: Path, srun: Tasks, capfd: pytest.CaptureFixture[str]
) -> None:
    """As `--signal=TERM@120` and a requeue do; meanwhile a second job is refused."""
    arguments = ("train", job(), "parallel.dp=2", "--resume", "auto")
    tasks = srun(2, *arguments, "train.max_steps=100000")
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 180
    while not metrics.exists() or metrics.read_text().count("\n") < 3:
        assert tasks[0].poll() is None and time.monotonic() < deadline, tasks[0].communicate()
        time.sleep(0.05)
    assert main([*map(str, arguments)]) == 2
    assert "is in use by another moe-train" in capfd.readouterr().err
    for process in tasks:
        process.send_signal(signal.SIGTERM)
    ended = [(*p.communicate(timeout=180), p.returncode) for p in tasks]
    assert [code for _, _, code in ended] == [128 + signal.SIGTERM] * 2, ended
    (saved,) = (tmp_path / "run").glob("checkpoint-*")
    step = int(saved.name.partition("-")[2])
    again = srun(2, *arguments, f"train.max_steps={step + 1}")
    ended = [(*p.communicate(timeout=180), p.returncode) for p in again]
    assert [code for _, _, code in ended] == [0] * 2, ended
    first, last = run_json(tmp_path / "run")
    assert first["exit_reason"] == "stopped by SIGTERM after saving"
    assert last["resumed_from"] == str(saved)
