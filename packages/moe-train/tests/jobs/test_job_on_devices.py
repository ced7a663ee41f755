"""A whole job on devices of devicetest, under NCCL's rules: train, save, resume, save.

Ranks of two stages with two expert ranks each have the losses of one process on the CPU. Every
thread means the right device, nothing of the CPU is given to NCCL, and no two streams race. A rank
that is killed or stopped is named by all others, before torch's watchdog would kill them.
"""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
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
from ranktest import collect_ranks, run_ranks
from unified_ckpt.geometry import shard

pytestmark = pytest.mark.skipif(
    not has_nccl_rules(), reason="this torch takes no process group written in Python"
)
Configure = Callable[..., Config]
STEPS = ("train.max_steps=3", "checkpoint.interval_steps=2", "optimizer.decay_steps=3")


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(folder / "metrics.jsonl") if "loss" in line]


def as_launched(rank: int, world_size: int, port: int) -> dict[str, str]:
    """The environment of a rank of this machine."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


OFFLOADED = ("train.offload_optimizer=true", "checkpoint.save_mode=zero_cost")


@pytest.mark.parametrize(("given", "more"), [("nccl", ()), ("", ()), ("", OFFLOADED)])
def test_a_job_on_devices_saves_and_resumes_to_the_losses_of_the_cpu(
    configure: Configure, tmp_path: Path, given: str, more: tuple[str, ...]
) -> None:
    alone = configure(*STEPS, f"train.output_dir={tmp_path}/alone")
    check(alone, "")
    run_ranks(lambda *_: train(alone, "", RankContext()), 1)
    layout = ("parallel.pp=2", "parallel.ep=2", "train.device=cuda", *STEPS, *more)
    short = configure(*layout, "train.max_steps=2")
    whole = configure(*layout)
    ports = [free_port(), free_port()]  # a store of its own for each run

    def fn(rank: int, world_size: int) -> None:
        with fake_cuda(devices=4, unchecked=[(shard, "_check_tensor")]) as cuda:
            for config, resume, port in ((short, "", ports[0]), (whole, "latest", ports[1])):
                os.environ |= as_launched(rank, world_size, port)
                if given:
                    torch.cuda.set_device(rank)
                    store = dist.FileStore(str(tmp_path / f"store{resume}"), world_size)
                    dist.init_process_group(given, store=store, rank=rank, world_size=world_size)
                train(config, resume, RankContext())
            cuda.check()

    run_ranks(fn, 4, init=False, timeout_s=120)
    assert len(losses(tmp_path / "run")) == 3
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "alone"), abs=1e-5)


LIMIT_S = 24.0
LAYOUT = ("parallel.pp=2", "parallel.ep=2", f"parallel.timeout_s={LIMIT_S}", "train.device=cuda")
ENDLESS = ("train.max_steps=100000", "optimizer.decay_steps=100000")


def strike(folder: Path, fault: signal.Signals) -> None:
    """Kill or stop this process once the job in `folder` has a loss."""

    def when_begun() -> None:
        while not (folder / "run/metrics.jsonl").exists() or not losses(folder / "run"):
            time.sleep(0.05)
        (folder / "struck").write_text(str(os.getpid()))
        os.kill(os.getpid(), fault)

    threading.Thread(target=when_begun, daemon=True).start()


def struck_job(configure: Configure, folder: Path, fault: signal.Signals, given: str) -> list[str]:
    """Strike rank 3 of 4: what each of the others raises."""
    config = configure(*ENDLESS, *LAYOUT, f"train.output_dir={folder}/run")
    port = free_port()

    def host() -> None:
        """As torchrun has it, the store does not end with a rank; nor does a stopped one."""
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        while len(list(folder.glob("told-*"))) < 3:
            time.sleep(0.05)
        if fault == signal.SIGSTOP:
            os.kill(int((folder / "struck").read_text()), signal.SIGKILL)
        del store

    def fn(rank: int, _: int) -> None:
        if rank == 4:
            return host()
        os.environ |= as_launched(rank, 4, port) | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
        with fake_cuda(devices=4, unchecked=[(shard, "_check_tensor")], nccl={"watchdog": True}):
            torch.cuda.set_device(rank)
            if given:
                limit = timedelta(seconds=LIMIT_S)
                dist.init_process_group(given, rank=rank, world_size=4, timeout=limit)
            if rank == 3:
                strike(folder, fault)
            with pytest.raises(RuntimeError) as error:
                train(config, "", RankContext())
            text = "\n".join([str(error.value), *getattr(error.value, "__notes__", [])])
            (folder / f"part-{rank}").write_text(text)
            (folder / f"part-{rank}").rename(folder / f"told-{rank}")
            os._exit(1)  # at once, as a rank ends that fails

    collect_ranks(fn, 5, init=False, timeout_s=300)
    return [told.read_text() for told in folder.glob("told-*")]


def check_told(told: list[str]) -> None:
    """All but rank 3 name it; at the limit the watchdog would have killed who waits for it."""
    assert len(told) == 3, told
    assert all("rank 3" in text or "ranks [3]" in text for text in told), told


@pytest.mark.parametrize("given", ["nccl", ""])
def test_a_rank_that_is_killed_in_a_job_is_named_by_all_others(
    configure: Configure, tmp_path: Path, given: str
) -> None:
    check(configure(*ENDLESS), "")
    check_told(struck_job(configure, tmp_path, signal.SIGKILL, given))


def test_a_rank_that_is_stopped_in_a_job_is_named_by_all_others(
    configure: Configure, tmp_path: Path
) -> None:
    """Also by a rank that waits for one that waits for it, and gives up first."""
    check(configure(*ENDLESS), "")
    told = struck_job(configure, tmp_path, signal.SIGSTOP, "nccl")
    check_told(told)
    assert all("no sign of life from rank 3 for" in text for text in told), told
