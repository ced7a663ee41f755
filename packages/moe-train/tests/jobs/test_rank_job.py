"""The job module of `moe-train train`, called as a rank calls it."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from moe_train.checkpoint import read_state
from moe_train.config import Config, dump_toml
from moe_train.jobs.job import check
from moe_train.rank import RankContext, RankJobError, run_rank, watch_stop_signals
from moe_train.report.metrics import read_metrics
from ranktest import run_ranks
from unified_ckpt.folders import find_fault

JOB = "moe_train.jobs.rank_job"
Configure = Callable[..., Config]


def written(config: Config, folder: Path) -> str:
    check(config, "")
    path = folder / "resolved.toml"
    path.write_text(dump_toml(config))
    return str(path)


def test_a_loss_that_is_not_a_number_saves_the_state_before_it_and_is_named_with_rank_and_steps(
    configure: Configure, tmp_path: Path
) -> None:
    toml = written(configure("parallel.dp=2", "optimizer.lr=1e30"), tmp_path)

    def run(rank: int, _: int) -> object:
        os.environ["RANK"] = str(rank)
        try:
            run_rank(JOB, [toml, ""], RankContext())
        except RankJobError as error:
            return str(error), error.error.rank, error.error.step, error.error.text
        return None

    for rank, told in enumerate(run_ranks(run, 2)):
        message, number, step, text = told  # type: ignore[misc]
        assert (number, step) == (rank, 1)
        assert re.match(
            rf"rank {rank}, step 1: NonFiniteLossError: loss=\S+ and gradient norm=nan are not f",
            message,
        )
        assert text.startswith("NonFiniteLossError: ") and "\n" not in text
        assert message.endswith(f"the state before it is saved as {tmp_path}/run/checkpoint-1")
    assert [line["step"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1]
    (left,) = (tmp_path / "run").glob("checkpoint-*")
    assert (left.name, read_state(left).step, find_fault(left)) == ("checkpoint-1", 1, None)


def test_a_resumed_job_that_fails_at_once_names_the_steps_of_its_checkpoint(
    configure: Configure, trained_run: Path, tmp_path: Path
) -> None:
    source = tmp_path / "checkpoint-2"
    shutil.copytree(trained_run / "checkpoint-2", source)
    weights = load_file(source / "model.safetensors")
    weights["model.norm.weight"][0] = torch.nan
    save_file(weights, source / "model.safetensors")
    (source / "manifest.json").unlink()
    toml = written(configure(), tmp_path)

    def run(*_: int) -> str:
        try:
            run_rank(JOB, [toml, str(source)], RankContext())
        except RankJobError as error:
            return str(error)
        return "it trained"

    (message,) = run_ranks(run, 1)
    assert str(message).startswith("rank 0, step 2: NonFiniteLossError: loss=nan"), message
    assert "the weights after step 2 are not finite themselves, so they are not saved" in message
    assert not list((tmp_path / "run").glob("checkpoint-*"))


def test_overrides_and_the_number_of_threads_reach_the_rank(
    configure: Configure, tmp_path: Path
) -> None:
    """In a process of its own, since threads of OpenMP do not survive a fork."""
    argv = [written(configure(), tmp_path), "", "train.max_steps=1", "train.threads_per_rank=3"]
    program = "\n".join(
        [
            "import torch",
            "from moe_train.rank import RankContext, run_rank",
            f"run_rank({JOB!r}, {argv!r}, RankContext())",
            "print('threads', torch.get_num_threads())",
        ]
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **place},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "threads 3", done.stderr
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-1"]


def test_a_request_to_stop_ends_the_job_with_a_checkpoint(
    configure: Configure, tmp_path: Path
) -> None:
    toml = written(configure(), tmp_path)

    def run(*_: int) -> None:
        context = watch_stop_signals()
        signal.raise_signal(signal.SIGTERM)
        run_rank(JOB, [toml, ""], context)

    run_ranks(run, 1)
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-1"]
