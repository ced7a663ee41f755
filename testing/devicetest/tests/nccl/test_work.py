"""On which stream a call of NCCL runs, and how long torch keeps what it uses."""

import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist

from devicetest import Machine, fake_cuda
from ranktest import run_ranks

FREED = "freed while another stream uses it"


def found_in(cuda: Machine, program: Callable[[], None]) -> list[str]:
    """Run a part of a program; return the kinds of races in it."""
    cuda.forget()
    program()
    kinds = sorted(race.kind for race in cuda.races)
    cuda.forget()
    return kinds


def in_turn(*, async_op: bool) -> None:
    """A call waited for where its tensor is used and freed."""
    x = torch.ones(8, device="cuda")
    work = dist.all_reduce(x, async_op=async_op)
    if work is not None:
        work.wait()
    x.add_(1)


def elsewhere(side: torch.cuda.Stream, *, async_op: bool, waits: bool) -> None:
    """A call in another stream than the one in which its tensor is freed."""
    x = torch.ones(8, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work = dist.all_reduce(x, async_op=async_op)
        if work is not None and waits:
            work.wait()


def swapped(side: torch.cuda.Stream, *, batched: bool) -> None:
    """Transfers waited for in another stream than the one in which their tensors are freed."""
    rank = dist.get_rank()
    x, y = (torch.ones(8, device="cuda") for _ in range(2))
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        if batched:
            ops = [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, y, 1 - rank)]
            works = dist.batch_isend_irecv(ops)
        else:
            works = [dist.irecv(x, 0) if rank else dist.isend(x, 1)]
        for work in works:
            work.wait()


def posted(*, waits: bool) -> None:
    """A transfer begun ahead, whose tensor is used in the compute stream."""
    y = torch.empty(8, device="cuda")
    work = dist.irecv(y, 0) if dist.get_rank() else dist.isend(y, 1)
    torch.ones(8, device="cuda").add_(1)
    if waits:
        work.wait()
    y.fill_(2)


def test_calls_run_and_keep_their_tensors_as_torch_does_it() -> None:
    def fn(rank: int, world_size: int) -> None:
        with fake_cuda(devices=2) as cuda:
            torch.cuda.set_device(rank)
            store = dist.FileStore(f"{folder}/store", 2)
            dist.init_process_group("nccl", store=store, rank=rank, world_size=2)
            side = torch.cuda.Stream()
            assert found_in(cuda, lambda: in_turn(async_op=True)) == []
            assert found_in(cuda, lambda: in_turn(async_op=False)) == []
            # Without `async_op` a call is one of the current stream, and nothing is kept.
            assert found_in(cuda, lambda: elsewhere(side, async_op=False, waits=False)) == [FREED]
            # What is waited for in another stream is let go of there.
            assert found_in(cuda, lambda: elsewhere(side, async_op=True, waits=True)) == [FREED]
            # What nobody waits for the watchdog keeps until it has ended.
            assert found_in(cuda, lambda: elsewhere(side, async_op=True, waits=False)) == []
            # Transfers record their stream, whoever waits for them.
            assert found_in(cuda, lambda: swapped(side, batched=True)) == []
            assert found_in(cuda, lambda: swapped(side, batched=False)) == []
            assert found_in(cuda, lambda: posted(waits=True)) == []
            kind = "write after write" if rank else "write after read"
            assert found_in(cuda, lambda: posted(waits=False)) == [kind]
            dist.barrier()
            assert [sync.kind for sync in cuda.syncs] == ["barrier"]

    with tempfile.TemporaryDirectory() as folder:
        run_ranks(fn, 2, init=False, timeout_s=120)
