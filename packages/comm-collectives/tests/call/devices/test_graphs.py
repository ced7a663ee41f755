"""Calls in a CUDA graph: replayed without the host where shapes are known, else refused by name."""

from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import comm_collectives as cc
from comm_collectives.call.frames import Frames
from comm_collectives.errors import CommValueError
from devicetest import fake_cuda
from devicetest.nccl import has_nccl_rules
from ranktest import run_ranks

pytestmark = pytest.mark.skipif(
    not has_nccl_rules(), reason="this torch takes no process group written in Python"
)


def on_two_devices(folder: Path, program: Callable[[int], object]) -> None:
    """Run a program on two ranks, each with a device of its own."""

    def fn(rank: int, world_size: int) -> None:
        with fake_cuda(devices=2) as cuda:
            torch.cuda.set_device(rank)
            store = dist.FileStore(str(folder / "store"), 2)
            dist.init_process_group("nccl", store=store, rank=rank, world_size=2)
            program(rank)
            cuda.check()

    run_ranks(fn, 2, init=False, timeout_s=120)


def counted_offers() -> "mock._patch[mock.MagicMock]":
    """Count how often this rank meets the others over the host."""
    return mock.patch.object(Frames, "offer", autospec=True, side_effect=Frames.offer)


def test_calls_of_known_shapes_are_captured_without_the_host_and_replayed(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        x = torch.ones(4, 2, device="cuda", requires_grad=True)
        splits = [1, 3] if rank == 0 else [3, 1]
        ours = torch.full((4, 2), 1.0 + rank, device="cuda")

        def step() -> list[torch.Tensor]:
            total = cc.all_reduce(x.detach() * ours)
            piece = cc.reduce_scatter(x.detach() * ours)
            rows = cc.all_to_all(x.detach() * ours, input_splits=splits, output_splits=splits)
            cc.all_reduce(x * ours).sum().backward()
            return [total, piece, rows]

        step()  # NCCL makes its communicator outside of a graph, and so do the ranks theirs
        graph = torch.cuda.CUDAGraph()
        with counted_offers() as offers:
            with torch.cuda.graph(graph):
                total, piece, rows = step()
            for value in (2.0, 5.0):
                with torch.no_grad():
                    x.fill_(value)
                    x.grad.zero_()
                graph.replay()
                assert total.unique().tolist() == [3 * value]
                assert piece.unique().tolist() == [3 * value] and len(piece) == 2
                assert rows[:, 0].tolist() == [value] * splits[0] + [2 * value] * splits[1]
                assert x.grad.unique().tolist() == [2 * (1.0 + rank)]
            assert not offers.called
            cc.all_reduce(ours)  # the first call outside of the graph is compared
            assert offers.call_count == 1

    on_two_devices(tmp_path, program)


def test_calls_that_need_the_host_are_refused_by_name_in_a_capture(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        x = torch.ones(4, 2, device="cuda")
        idx = torch.zeros(4, 1, dtype=torch.int64, device="cuda")
        weights = torch.ones(4, 1, device="cuda")
        refused: dict[str, Callable[[], object]] = {
            "all_gather": lambda: cc.all_gather(x),
            "all_to_all": lambda: cc.all_to_all(x, input_splits=[2, 2]),
            "broadcast": lambda: cc.broadcast(x if rank == 0 else None, src=0),
            "broadcast_nested": lambda: cc.broadcast_nested(x if rank == 0 else None, src=0),
            "send": lambda: cc.send(x, dst=1 - rank, async_op=True),
            "recv": lambda: cc.recv(src=1 - rank),
            "dispatch": lambda: cc.dispatch(x, idx, weights, num_experts=2, group=dist.group.WORLD),
            "async_op": lambda: cc.all_reduce(x, async_op=True),
            "timeout_s": lambda: cc.all_reduce(x, timeout_s=5.0),
        }
        cc.all_reduce(x)
        for name, call in refused.items():
            told = pytest.raises(CommValueError, match="cannot be captured")
            with torch.cuda.graph(torch.cuda.CUDAGraph()), told as error:
                call()
            assert name in str(error.value)
        assert cc.all_reduce(x).unique().tolist() == [2]

    on_two_devices(tmp_path, program)
