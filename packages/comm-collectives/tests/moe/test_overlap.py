"""Chunks give what one dispatch gives, and the next one travels while the experts compute."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import comm_collectives as cc
from comm_collectives.call.handles import Handle
from comm_collectives.errors import RefusedError
from comm_collectives.moe import Dispatched, combine_async, dispatch_async, overlap
from comm_collectives.moe.overlap import OverlappedMoe
from ranktest import run_ranks

_EXPERTS, _HIDDEN = 4, 6


def _tokens(rank: int, count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(count, _HIDDEN, dtype=torch.float64, generator=generator)
    weights, idx = torch.rand(count, _EXPERTS, generator=generator).double().topk(2, dim=1)
    return [x.requires_grad_(), idx, weights.requires_grad_()]


def _experts(scale: torch.Tensor, first: int):
    def run(sent: Dispatched) -> torch.Tensor:
        counts = torch.tensor(sent.num_tokens_per_expert)
        own = scale[first : first + len(counts)].repeat_interleave(counts, dim=0)
        return torch.tanh(sent.x * own) * sent.topk_weights[:, None]

    return run


def test_chunks_equal_one_dispatch() -> None:
    def results(rank: int, world_size: int, count: int, num_chunks: int) -> tuple[Any, ...]:
        """Those of so many chunks; of one plain dispatch for 0."""
        x, idx, weights = _tokens(rank, count)
        scale = torch.linspace(0.5, 2, _EXPERTS).double()[:, None].requires_grad_()
        experts, group = _experts(scale, rank * _EXPERTS // world_size), dist.group.WORLD
        if num_chunks:
            moe = OverlappedMoe(num_experts=_EXPERTS, group=group, num_chunks=num_chunks)
            out = moe(x, idx, weights, experts)
        else:
            sent = cc.dispatch(x, idx, weights, num_experts=_EXPERTS, group=group)
            out = cc.combine(experts(sent), sent.handle)
        out.square().sum().backward()
        return out, x.grad, weights.grad, scale.grad

    def fn(rank: int, world_size: int) -> None:
        for counts in ((7, 4), (0, 3), (0, 0)):
            plain = results(rank, world_size, counts[rank], 0)
            for num_chunks in (1, 2, 5):
                ours = results(rank, world_size, counts[rank], num_chunks)
                torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)

    run_ranks(fn, 2)


def test_next_chunk_arrives_while_the_experts_compute() -> None:
    def fn(rank: int, world_size: int) -> list[bool]:
        x, idx, weights = (t.detach() for t in _tokens(rank, 8))
        seen: list[bool] = []
        moe = OverlappedMoe(num_experts=_EXPERTS, group=dist.group.WORLD, num_chunks=3)
        handles: list[Handle[Dispatched]] = []

        def start(*chunk: torch.Tensor, **settings: Any) -> Handle[Dispatched]:
            handles.append(dispatch_async(*chunk, **settings))
            return handles[-1]

        overlap.dispatch_async = start

        def experts(sent: Dispatched) -> torch.Tensor:
            deadline = time.monotonic() + 10
            while not handles[-1].is_done() and time.monotonic() < deadline:
                time.sleep(0.01)
            seen.append(handles[-1].is_done())
            return sent.x

        moe(x, idx, weights, experts)
        return seen

    assert run_ranks(fn, 2) == [[True, True, True]] * 2


def test_asynchronous_dispatch_and_combine_return_handles_on_one_rank_and_many() -> None:
    def fn(rank: int, world_size: int) -> None:
        for group in (None, dist.group.WORLD):
            x, idx, weights = _tokens(rank, 5)
            coming = dispatch_async(x, idx, weights, num_experts=_EXPERTS, group=group)
            sent = coming.wait()
            y = sent.x * sent.topk_weights[:, None]
            out = combine_async(y, sent.handle).wait()
            out.sum().backward()
            torch.testing.assert_close(out, x * weights.sum(1, keepdim=True))
            torch.testing.assert_close(x.grad, weights.detach().sum(1, keepdim=True).expand_as(x))

    run_ranks(fn, 2)


def test_experts_that_raise_on_one_rank_are_an_error_on_every_rank() -> None:
    """Whatever chunk it was: all ranks made the same calls, so the group goes on."""

    def fn(rank: int, world_size: int) -> None:
        for bad in (0, 1, 2):
            x, idx, weights = _tokens(rank, 8)
            chunks: list[int] = []

            def experts(sent: Dispatched, chunks: list[int] = chunks, bad: int = bad):
                chunks.append(len(chunks))
                if rank == 1 and chunks[-1] == bad:
                    raise MemoryError("no room for these rows")
                return sent.x

            moe = OverlappedMoe(num_experts=_EXPERTS, group=dist.group.WORLD, num_chunks=3)
            with pytest.raises(RefusedError, match="rank 1: the experts raised MemoryError: no ro"):
                moe(x, idx, weights, experts)
            assert chunks == list(range(3 if rank == 0 else bad + 1))
            assert cc.all_reduce(torch.ones(1)).item() == world_size

    run_ranks(fn, 2)


def test_experts_that_raise_on_one_rank_alone_raise_that() -> None:
    def experts(sent: Dispatched) -> torch.Tensor:
        raise MemoryError("no room for these rows")

    with pytest.raises(MemoryError, match="no room"):
        OverlappedMoe(num_experts=_EXPERTS)(*_tokens(0, 8), experts)


@pytest.mark.parametrize("x", [torch.ones(()), [[1.0]], None])
def test_tokens_of_one_rank_that_cannot_be_cut_are_refused_on_every_rank(x: Any) -> None:
    def fn(rank: int, world_size: int) -> None:
        tokens, idx, weights = _tokens(rank, 3)
        moe = OverlappedMoe(num_experts=_EXPERTS, group=dist.group.WORLD)
        with pytest.raises((ValueError, TypeError), match="refused: rank 1: x "):
            moe(x if rank == 1 else tokens, idx, weights, lambda sent: sent.x)
        assert cc.all_reduce(torch.ones(1)).item() == world_size

    run_ranks(fn, 2)


def test_options_of_another_type_are_refused() -> None:
    moe = OverlappedMoe(num_experts=_EXPERTS, options=None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="options is a NoneType; give MoeOptions"):
        moe(*_tokens(0, 3), lambda sent: sent.x)


def test_mistakes_are_refused_when_made() -> None:
    with pytest.raises(TypeError, match=r"num_chunks=2.0 is a float; give an integer"):
        OverlappedMoe(num_experts=2, group=None, num_chunks=2.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_chunks=0"):
        OverlappedMoe(num_experts=2, group=None, num_chunks=0)
