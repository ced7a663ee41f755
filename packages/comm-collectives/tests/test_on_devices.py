"""Calls of two ranks on devices of devicetest, under NCCL's rules, with NCCL alone.

Threads of this package mean the rank's own device, as the program's does, and two ranks that swap
tensors by sends and receives come to an end.
"""

import gc
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

import comm_collectives as cc
from comm_collectives.checking.cells import COLUMNS, all_cases
from comm_collectives.checking.matrix import judge_order
from comm_collectives.checking.rank_side import HERE, Order, answer
from comm_collectives.collectives import drop_in
from comm_collectives.errors import LostGradientWarning
from devicetest import fake_cuda
from devicetest.nccl import has_nccl_rules
from ranktest import run_ranks

pytestmark = pytest.mark.skipif(
    not has_nccl_rules(), reason="this torch takes no process group written in Python"
)


def on_devices(folder: Path, program: Callable[[int], object], backend: str = "nccl") -> None:
    """Run a program on two ranks, each with a device of its own, and look for faults."""

    def fn(rank: int, world_size: int) -> None:
        with fake_cuda(devices=2) as cuda:
            torch.cuda.set_device(rank)
            store = dist.FileStore(str(folder / f"store-{backend}"), 2)
            dist.init_process_group(backend, store=store, rank=rank, world_size=2)
            program(rank)
            cuda.check()

    run_ranks(fn, 2, init=False, timeout_s=120)


def from_thread(handle: cc.Handle[torch.Tensor]) -> torch.Tensor:
    """Let the group's thread do all of a call, which a thread that waits would do itself."""
    while not handle.is_done():
        time.sleep(1e-3)
    return handle.wait()


def test_threads_of_calls_mean_the_device_of_the_rank(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        on_device = from_thread(cc.all_reduce(torch.ones(3, device="cuda"), async_op=True))
        assert on_device.get_device() == rank and on_device.tolist() == [2] * 3
        on_host = from_thread(cc.all_reduce(torch.ones(3), async_op=True))
        assert on_host.device.type == "cpu" and on_host.tolist() == [2] * 3
        x = torch.ones(2, device="cuda") if rank == 0 else None
        assert from_thread(cc.broadcast(x, src=0, async_op=True)).get_device() == rank
        both = None if x is None else [x, x]
        assert from_thread(cc.scatter(both, src=0, async_op=True)).get_device() == rank
        # Rank 1 drops the graph: its thread that answers takes part in the backward of rank 0.
        cc.set_agreement(cc.AgreementPolicy(every=1))
        x = torch.ones(4, device="cuda", requires_grad=True)
        y = cc.all_to_all(x)
        if rank == 0:
            y.sum().backward()
            assert x.grad is not None and x.grad.tolist() == [1, 1, 0, 0]
        else:
            del y
            gc.collect()
        warned = pytest.warns(LostGradientWarning) if rank else nullcontext()
        with warned:
            cc.all_reduce(torch.ones(1, device="cuda"))
        # Transfers have threads for each peer.
        handle = cc.send(x.detach(), dst=1 - rank, async_op=True)
        got = cc.recv(src=1 - rank, async_op=True).wait()
        handle.wait()
        assert got.get_device() == rank
        assert {thread.name for thread in threading.enumerate()} > {"MainThread"}

    on_devices(tmp_path, program)


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_two_ranks_swap_by_differentiable_sends_and_receives(tmp_path: Path, backend: str) -> None:
    def program(rank: int) -> None:
        # Larger than what NCCL buffers, so that each send waits for its receive.
        x = torch.full((1 << 14,), 1.0 + rank, device="cuda", requires_grad=True)
        handle = cc.send(x, dst=1 - rank, async_op=True)
        y = cc.recv(src=1 - rank)
        assert y[0].item() == 2 - rank
        ((y * 2).sum() + handle.wait().sum()).backward()
        assert x.grad is not None and x.grad.unique().tolist() == [2]

    on_devices(tmp_path, program, backend)


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_a_batch_of_transfers_has_arrived_when_its_works_were_waited_for(
    tmp_path: Path, backend: str
) -> None:
    def program(rank: int) -> None:
        with drop_in.patched_torch():
            for size in (8, 1 << 14):
                x, y = torch.full((size,), 1.0 + rank, device="cuda"), torch.zeros(size).cuda()
                ops = [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, y, 1 - rank)]
                for work in dist.batch_isend_irecv(ops):
                    work.wait()
                assert y.unique().tolist() == [2 - rank]
        with _coalescing_manager(device=y.device), pytest.raises(ValueError, match="torch gathers"):
            drop_in.isend(x, 1 - rank)
            drop_in.irecv(y, 1 - rank)
        assert y.unique().tolist() == [2 - rank]

    on_devices(tmp_path, program, backend)


def test_every_cell_is_right_where_new_tensors_are_on_the_device(tmp_path: Path) -> None:
    """As where torch's default device is set; nested values take no tensor of a subclass."""
    shapes = ("uneven", "strided", "no dims")
    cells = [c for c in all_cases(dtypes=[torch.bfloat16]) if "nested" not in c.collective]
    cells = [c for c in cells if c.columns == min(COLUMNS) and c.shape in shapes]
    orders = [Order(cell, HERE) for cell in cells]
    assert len({cell.collective for cell in cells}) > 20

    def program(rank: int) -> None:
        torch.set_default_device(torch.device("cuda", rank))
        outcomes = [judge_order(order, [answer(order)]) for order in orders]
        torch.set_default_device(None)
        assert [each for each in outcomes if not each.is_good] == []

    on_devices(tmp_path, program)


@pytest.mark.parametrize("kind", ["recv", "drop_in"])
def test_whoever_waits_for_a_receive_on_another_stream_reads_what_arrived(
    tmp_path: Path, kind: str
) -> None:
    def program(rank: int) -> None:
        device = torch.device("cuda", rank)
        first, second = torch.Stream(device=device), torch.Stream(device=device)
        for k in range(3):
            with first:
                x = torch.full((1 << 14,), 1.0 + k, device="cuda")
                y = torch.zeros_like(x)
                work: Any
                if kind == "drop_in":
                    work = drop_in.irecv(y, 0) if rank else drop_in.isend(x, 1)
                elif rank:
                    work = cc.recv(src=0, async_op=True)
                else:
                    work = cc.send(x, dst=1, async_op=True)
            with second:
                got = work.wait()
                if rank:
                    assert (got if kind == "recv" else y).unique().tolist() == [1 + k]

    on_devices(tmp_path, program)


def test_a_receive_is_written_where_the_callers_stream_reads_it(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        with torch.Stream(device=torch.device("cuda", rank)):
            for k in range(3):
                x = torch.full((1 << 14,), 1.0 + k, device="cuda")
                y = torch.zeros_like(x)
                work = drop_in.irecv(y, 0) if rank else drop_in.isend(x, 1)
                assert work is not None
                work.wait()
                y.add_(1)
                assert y.unique().tolist() == [2 + k if rank else 1]

    on_devices(tmp_path, program)
