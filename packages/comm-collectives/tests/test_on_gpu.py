"""CUDA tensors: alone, over gloo (staged on the host) and over nccl with one rank.

Everything runs in forked ranks, so that the parent never initialises CUDA.
"""

import pytest
import torch
import torch.distributed as dist

import comm_collectives as cc
from comm_collectives.alltoall import exchange_rows
from comm_collectives.calls import Call
from comm_collectives.counts import Signature, exchange_counts
from comm_collectives.groups import group_state
from ranktest import run_ranks

pytestmark = pytest.mark.gpu


def _layer(device: str, group: dist.ProcessGroup | None, rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(20, 6, generator=generator, dtype=torch.float64).to(device).requires_grad_()
    idx = torch.rand(20, 4, generator=generator).topk(2, dim=1).indices.to(device)
    weights = torch.rand(20, 2, generator=generator, dtype=torch.float64).to(device)
    weights.requires_grad_()
    sent = cc.dispatch(x, idx, weights, num_experts=4, group=group, expert_alignment=4)
    assert sent.x.device.type == device
    out = cc.combine(sent.x.square() * sent.topk_weights[:, None], sent.handle)
    out.sum().backward()
    assert x.grad is not None
    assert weights.grad is not None
    return [t.detach().cpu() for t in (out, x.grad, weights.grad)]


def test_dispatch_on_cuda_equals_the_host() -> None:
    def fn(rank: int, world_size: int) -> None:
        for got, want in zip(_layer("cuda", None, 0), _layer("cpu", None, 0), strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-12)

    run_ranks(fn, 1, init=False)


def test_cuda_tensors_over_gloo_equal_the_host() -> None:
    def fn(rank: int, world_size: int) -> None:
        group = dist.group.WORLD
        for got, want in zip(_layer("cuda", group, rank), _layer("cpu", group, rank), strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
        x = torch.full((2, 3), rank, dtype=torch.int16, device="cuda")
        y = cc.all_to_all(x)
        assert y.is_cuda
        assert y[:, 0].tolist() == [0, 1]
        assert cc.all_reduce(x.t()).flatten().tolist() == [1] * 6
        got = cc.broadcast_nested([x] if rank == 1 else None, src=1, device="cuda")
        assert isinstance(got, list)
        assert got[0].is_cuda
        assert bool((got[0] == 1).all())
        if rank == 0:
            cc.isend_tensors([x.t(), x[:0]], dst=1).wait()
        else:
            received, empty = cc.recv_tensors(src=0, device="cuda")
            assert received.is_cuda
            assert received.shape == (3, 2)
            assert not received.any()
            assert empty.shape == (0, 3)

    run_ranks(fn, 2)


def test_nccl_with_one_rank() -> None:
    def fn(rank: int, world_size: int) -> None:
        torch.cuda.set_device(0)
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        group, state = group_state(None)
        assert state.control_type == "cuda"
        cuda = torch.device("cuda")
        assert state.transport_type(cuda) == state.transport_type(torch.device("cpu")) == "cuda"
        value = {"a": torch.ones(2, dtype=torch.uint16), "b": [None, "x"]}
        got = cc.broadcast_nested(value, src=0, device="cuda")
        assert isinstance(got, dict)
        assert got["a"].is_cuda
        # One rank needs no exchange; the exchanges themselves, as many ranks make them:
        for timeout_s in (None, 20.0):
            call = Call(state, "test", timeout_s=timeout_s)
            x = torch.arange(6, device="cuda").view(3, 2)
            y = torch.empty_like(x)
            exchange_rows(call, group, x, [3], [3], y)
            assert torch.equal(y, x)
            signature = Signature(words=(1, 2), text="")
            counts = exchange_counts(
                call, group, [[7, 8]], signature=signature, device=cuda, flags=1
            )
            assert (counts.flags, counts.rows) == (1, [[7, 8]])
        assert cc.all_reduce(x.t()).tolist() == x.t().tolist()
        assert cc.all_to_all(x).tolist() == x.tolist()
        dist.destroy_process_group()

    run_ranks(fn, 1, init=False)
