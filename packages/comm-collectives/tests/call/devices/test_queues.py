"""Launches of two communicators have one order on every rank where a device has one queue."""

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import comm_collectives as cc
from comm_collectives.call.devices.queues import SETTING
from comm_collectives.errors import CommError, CommValueError
from devicetest import fake_cuda
from devicetest.nccl import has_nccl_rules
from ranktest import run_ranks

pytestmark = pytest.mark.skipif(
    not has_nccl_rules(), reason="this torch takes no process group written in Python"
)


@pytest.mark.parametrize("setting", ["1", ""])
def test_asynchronous_calls_of_two_groups_are_queued_in_the_order_of_the_program(
    tmp_path: Path, setting: str
) -> None:
    """The first group of rank 0 is held up on the host, where its thread waits for rank 1."""

    def fn(rank: int, world_size: int) -> tuple[list[str], str]:
        os.environ[SETTING] = setting
        with fake_cuda(devices=2, nccl={"order": "device"}):
            torch.cuda.set_device(rank)
            store = dist.FileStore(str(tmp_path / "store"), 2)
            backend = "cpu:gloo,cuda:nccl"
            dist.init_process_group(backend, store=store, rank=rank, world_size=2)
            one, two = dist.new_group(), dist.new_group()
            x = torch.ones(4, device="cuda")
            for group in (one, two):
                cc.all_reduce(x, group=group)
            before = len(one.launches())  # type: ignore[union-attr]
            if rank == 1:
                time.sleep(1.0)
            handles = [cc.all_reduce(torch.ones(4), group=one, async_op=True)]
            handles.append(cc.all_reduce(x, group=one, async_op=True))
            if rank == 1:
                time.sleep(0.5)
            handles.append(cc.all_reduce(x, group=two, async_op=True))
            told = ""
            try:
                for handle in handles:
                    handle.wait()
            except CommError as error:
                told = str(error)
            if setting:
                with pytest.raises(CommValueError, match=f"can hang under {SETTING}=1"):
                    cc.send(x, dst=1 - rank)
            return one.launches()[before:], told  # type: ignore[union-attr]

    (first, told), (second, _) = run_ranks(fn, 2, init=False, timeout_s=60)  # type: ignore[misc]
    if setting:
        assert first == second and len(first) == 2 and not told
    else:  # what the setting has to prevent, if devices have one queue
        assert first == second[::-1] and "deadlock" in told
