"""A whole job on devices of devicetest, under NCCL's rules: train, save, resume, save.

Ranks of two stages with two expert ranks each have the losses of one process on the CPU. Every
thread means the right device, nothing of the CPU is given to NCCL, and no two streams race.
"""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from devicetest import fake_cuda
from devicetest.nccl import has_nccl_rules
from moe_train.config import Config
from moe_train.jobs.job import check, train
from moe_train.rank import RankContext
from moe_train.report.metrics import read_metrics
from ranktest import run_ranks
from unified_ckpt.geometry import shard

pytestmark = pytest.mark.skipif(
    not has_nccl_rules(), reason="this torch takes no process group written in Python"
)
Configure = Callable[..., Config]
STEPS = ("train.max_steps=3", "checkpoint.interval_steps=2", "optimizer.decay_steps=3")


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(folder / "metrics.jsonl") if "loss" in line]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("given", ["nccl", ""])
def test_a_job_on_devices_saves_and_resumes_to_the_losses_of_the_cpu(
    configure: Configure, tmp_path: Path, given: str
) -> None:
    alone = configure(*STEPS, f"train.output_dir={tmp_path}/alone")
    check(alone, "")
    run_ranks(lambda *_: train(alone, "", RankContext()), 1)
    layout = ("parallel.pp=2", "parallel.ep=2", "train.device=cuda", *STEPS)
    short = configure(*layout, "train.max_steps=2")
    whole = configure(*layout)
    ports = [free_port(), free_port()]  # a store of its own for each run

    def fn(rank: int, world_size: int) -> None:
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
        }
        with fake_cuda(devices=4, unchecked=[(shard, "_check_tensor")]) as cuda:
            for config, resume, port in ((short, "", ports[0]), (whole, "latest", ports[1])):
                os.environ["MASTER_PORT"] = str(port)
                if given:
                    torch.cuda.set_device(rank)
                    store = dist.FileStore(str(tmp_path / f"store{resume}"), world_size)
                    dist.init_process_group(given, store=store, rank=rank, world_size=world_size)
                train(config, resume, RankContext())
            cuda.check()

    run_ranks(fn, 4, init=False, timeout_s=120)
    assert len(losses(tmp_path / "run")) == 3
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "alone"), abs=1e-5)
