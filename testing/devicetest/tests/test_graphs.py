"""Captured work of fake devices is done again on the same memory, by a replay alone."""

import tempfile

import pytest
import torch
import torch.distributed as dist

from devicetest import fake_cuda
from ranktest import run_ranks


def test_a_replay_does_what_was_captured_again_and_a_wait_of_the_host_ends_a_capture() -> None:
    with fake_cuda() as cuda:
        x = torch.ones(4, device="cuda")
        graph = torch.cuda.CUDAGraph()
        assert not torch.cuda.is_current_stream_capturing()
        with torch.cuda.graph(graph):
            assert torch.cuda.is_current_stream_capturing()
            y = (x * 2).add_(1)
            z = y.view(2, 2).sum(0)
            with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
                y.sum().item()
        x.fill_(3)
        assert y.tolist() == [3] * 4
        graph.replay()
        assert y.tolist() == [7] * 4 and z.tolist() == [14, 14]
        with pytest.raises(ValueError), torch.cuda.graph(torch.cuda.CUDAGraph()):
            raise ValueError("of the program")
        assert not torch.cuda.is_current_stream_capturing()
        cuda.check()


def test_collectives_are_captured_and_replayed_with_what_is_there_then() -> None:
    def fn(rank: int, world_size: int) -> None:
        with fake_cuda(devices=2) as cuda:
            torch.cuda.set_device(rank)
            store = dist.FileStore(f"{folder}/store", 2)
            dist.init_process_group("nccl", store=store, rank=rank, world_size=2)
            x = torch.ones(4, device="cuda")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = x * (1 + rank)
                dist.all_reduce(y)
            for value in (2, 5):
                x.fill_(value)
                graph.replay()
                assert y.tolist() == [3 * value] * 4
            cuda.check()

    with tempfile.TemporaryDirectory() as folder:
        run_ranks(fn, 2, init=False)
