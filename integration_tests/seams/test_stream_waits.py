"""Side streams on devices of devicetest: no race, and one as soon as any wait is left out.

Every program runs on two ranks under NCCL's rules. Each line of the packages that lets a stream
wait, or keeps memory for a stream, is then left out in turn, which has to be found as a race.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import comm_collectives as cc
import devicetest
from comm_collectives.call import devices
from comm_collectives.moe import MoeOptions, OverlappedMoe, combine_async
from devicetest import DeviceTensor, Machine, fake_cuda
from devicetest.machine import Stream
from moe_pipeline.executor import StageOutput
from moe_pipeline.executor.options import ExecutorOptions
from moe_pipeline.executor.pipeline_executor import PipelineExecutor
from moe_pipeline.schedules.generators.catalog import SCHEDULES
from ranktest import run_ranks

Program = Callable[[], object]
PASSED_ON = (torch, devicetest, devices)  # their waits are those of who calls them
HIDDEN = (*(os.path.dirname(str(module.__file__)) for module in PASSED_ON), __file__)
# torch keeps what is sent, and nobody writes to it: this wait is there for its errors.
IN_VAIN = {"device_transfers.py wait"}


def line_of_wait() -> str:
    """The line of a package that waits; "" for NCCL's own waits."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(HIDDEN):
        if frame.f_code.co_name == "_order_streams":
            return ""
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)} {frame.f_code.co_name}"


@contextmanager
def without(left_out: str, seen: set[str]) -> Iterator[None]:
    """Leave out what a line does for the order of streams; collect all such lines."""
    wait_event, record_stream = Stream.wait_event, DeviceTensor.record_stream

    def wait(stream: Stream, event: Any) -> None:
        line = line_of_wait()
        seen.update({line} - {""})
        if not line or line != left_out:
            wait_event(stream, event)

    def record(tensor: DeviceTensor, stream: Stream) -> None:
        line = f"{line_of_wait()}, record_stream"
        seen.add(line)
        if line != left_out:
            record_stream(tensor, stream)

    with (
        mock.patch.object(Stream, "wait_event", wait),
        mock.patch.object(DeviceTensor, "record_stream", record),
    ):
        yield


def asynchronous() -> None:
    x = torch.ones(8, device="cuda")
    handle = cc.all_reduce(x, async_op=True)
    torch.ones(8, device="cuda").add_(1)
    handle.wait().add_(1)


def dropped() -> None:
    """A call for which nobody waits, and whose input is let go of."""
    handle = cc.all_reduce(torch.ones(8, device="cuda"), async_op=True)
    while not handle.is_done():
        time.sleep(1e-3)


def gradients() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4, device="cuda") for _ in range(3)))
    with cc.overlap_gradients(model.parameters(), bucket_bytes=64):
        model(torch.ones(2, 4, device="cuda")).sum().backward()
    for parameter in model.parameters():
        parameter.grad.add_(1)


def chunks(options: MoeOptions | None = None) -> None:
    x = torch.ones(8, 4, device="cuda", requires_grad=True)
    idx = torch.tensor([[0, 3], [1, 2]] * 4, device="cuda")
    weights = torch.full((8, 2), 0.5, device="cuda")
    world = dist.group.WORLD
    overlapped = OverlappedMoe(num_experts=4, group=world, options=options or MoeOptions())
    overlapped(x, idx, weights, lambda sent: sent.x * 2).sum().backward()


def combined() -> None:
    """A combine beside the program, of whose dispatch nothing is left when it has been queued."""
    x, idx = torch.ones(8, 4, device="cuda"), torch.tensor([[0, 3], [1, 2]] * 4, device="cuda")
    with torch.no_grad():
        weights = torch.full((8, 2), 0.5, device="cuda")
        sent = cc.dispatch(x, idx, weights, num_experts=4, group=dist.group.WORLD)
        handle = combine_async(sent.x, sent.handle)
        del sent
        while not handle.is_done():
            time.sleep(1e-3)
        handle.wait().add_(1)


def pipeline(name: str) -> None:
    """Steps whose receives wait for a message, one that posts them ahead, one of other shapes."""
    rank = dist.get_rank()
    schedule = SCHEDULES[name](2, 3)
    mine = (rank,) if schedule.num_stages == 2 else (rank, 3 - rank)
    weights = {i: torch.ones(8, device="cuda", requires_grad=True) for i in mine}

    def make(index: int) -> Callable[..., StageOutput]:
        def stage(x: torch.Tensor, *, target: object) -> StageOutput:
            y = x * weights[index]
            is_last = index == schedule.num_stages - 1
            return StageOutput(loss=y.sum()) if is_last else StageOutput(tensors=(y,))

        return stage

    executor = PipelineExecutor(
        {index: make(index) for index in mine},
        schedule,
        rank=rank,
        options=ExecutorOptions(device="cuda", timeout_s=60),
    )
    for rows in (3, 3, 3, 5):
        executor.step([(torch.ones(rows, 8, device="cuda"),)] * 3)


def races(cuda: Machine, program: Program, line: str, seen: set[str]) -> int:
    cuda.forget()
    with without(line, seen):
        program()
    found = len(cuda.races)
    cuda.forget()
    return found


PROGRAMS: tuple[Program, ...] = (
    asynchronous,
    dropped,
    gradients,
    chunks,
    lambda: chunks(MoeOptions(route="dedup")),
    combined,
    lambda: pipeline("1f1b"),
    lambda: pipeline("zbv"),
)


@pytest.mark.parametrize(("backend", "is_bound"), [("nccl", False), ("cpu:gloo,cuda:nccl", True)])
def test_no_stream_races_and_no_wait_can_be_left_out(backend: str, is_bound: bool) -> None:
    """Groups that are bound to a device also move both directions of a pipeline at once."""

    def fn(rank: int, world_size: int) -> set[str]:
        needed: set[str] = set()
        every: set[str] = set()
        with fake_cuda(devices=2) as cuda:
            torch.cuda.set_device(rank)
            store = dist.FileStore(f"{folder}/store", 2)
            device = torch.device("cuda", rank) if is_bound else None
            dist.init_process_group(backend, store=store, rank=rank, world_size=2, device_id=device)
            for program in PROGRAMS:
                seen: set[str] = set()
                program()
                cuda.check()
                assert races(cuda, program, "", seen) == 0
                lines: list[Any] = [None, None]
                dist.all_gather_object(lines, sorted(seen))
                every.update(*lines)
                for line in sorted({*lines[0], *lines[1]} - needed):
                    found: list[Any] = [None, None]
                    dist.all_gather_object(found, races(cuda, program, line, set()))
                    needed.update([line] if sum(found) else [])
            cuda.forget()
        return every - needed

    with tempfile.TemporaryDirectory() as folder:
        assert run_ranks(fn, 2, init=False, timeout_s=300) == [IN_VAIN, IN_VAIN]
