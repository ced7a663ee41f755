"""What all routes have in common: the experts' rows, rounding on the wire, gradients through it."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import comm_collectives as cc
from comm_collectives.moe import Dispatched
from comm_collectives.moe.options import MoeOptions
from comm_collectives.moe.rows.payload import RowCodec
from ranktest import run_ranks

_E, _D, _K = 8, 130, 3  # 130: a whole block and a short one
_ROUTES: list[dict[str, Any]] = [
    {"route": "flat"},
    {"route": "dedup"},
    {"route": "hierarchical", "ranks_per_node": 1},
    {"route": "hierarchical", "ranks_per_node": 2},
    {"route": "hierarchical", "ranks_per_node": 4},
]
_PAYLOADS: list[Any] = ["float8_e4m3", "int8"]


def _inputs(rank: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Rank 2 has no tokens; some choices are of no expert, some of one expert twice."""
    generator = torch.Generator().manual_seed(rank)
    tokens = 0 if rank == 2 else 7
    x = torch.randn(tokens, _D, generator=generator).to(dtype)
    idx = torch.randint(-1, _E, (tokens, _K), generator=generator)
    return x, idx, torch.rand(tokens, _K, generator=generator)


def _rounded(x: Tensor, payload: Any) -> Tensor:
    codec = RowCodec(payload)
    return codec.decode(codec.encode(x), hidden=x.shape[1], dtype=x.dtype)


def _dispatch(rank: int, alignment: int, dtype: torch.dtype, **options: Any) -> Dispatched:
    x, idx, weights = _inputs(rank, dtype)
    return cc.dispatch(
        x,
        idx,
        weights,
        num_experts=_E,
        group=dist.group.WORLD,
        expert_alignment=alignment,
        options=MoeOptions(timeout_s=30, **options),
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_experts_see_the_same_rows_on_every_route(dtype: torch.dtype) -> None:
    def fn(rank: int, world_size: int) -> None:
        for alignment in (1, 4):
            flat = _dispatch(rank, alignment, dtype)
            for route in _ROUTES[1:]:
                sent = _dispatch(rank, alignment, dtype, **route)
                assert torch.equal(sent.x, flat.x), route
                assert torch.equal(sent.topk_weights, flat.topk_weights), route
                assert sent.num_tokens_per_expert == flat.num_tokens_per_expert, route

    run_ranks(fn, 4)


@pytest.mark.parametrize(("weights", "bits"), [(torch.float16, 0x7C7A), (torch.bfloat16, 0x7F91)])
def test_rows_keep_their_bits_beside_weights_of_16_bits(weights: torch.dtype, bits: int) -> None:
    """Half of each element is a NaN where the memory of the rows is seen as that of the weights."""

    def fn(rank: int, world_size: int) -> None:
        numbers = torch.full((7, _D), 0x3F80_0000 + bits, dtype=torch.int32).view(torch.float32)
        idx = torch.randint(_E, (7, _K))
        for route in _ROUTES:
            x = numbers.clone().requires_grad_()
            sent = cc.dispatch(
                x,
                idx,
                torch.ones(7, _K, dtype=weights),
                num_experts=_E,
                group=dist.group.WORLD,
                options=MoeOptions(**route),
            )
            assert (sent.x == numbers[0]).all(), route
            sent.x.backward(numbers[0].expand(sent.x.shape))
            assert x.grad is not None
            torch.testing.assert_close(x.grad, _K * numbers, rtol=1e-7, atol=0)

    run_ranks(fn, 4)


@pytest.mark.parametrize("payload", _PAYLOADS)
def test_rows_are_rounded_once_on_every_route(payload: Any) -> None:
    """Bit for bit what the codec makes of them: forwarded rows are not rounded again."""

    def fn(rank: int, world_size: int) -> None:
        for dtype in (torch.float32, torch.bfloat16):
            full = _dispatch(rank, 4, dtype)
            want = _rounded(full.x, payload)
            assert rank == 2 or not torch.equal(want, full.x)
            for route in _ROUTES:
                sent = _dispatch(rank, 4, dtype, payload=payload, **route)
                assert torch.equal(sent.x, want), (route, dtype)
                assert torch.equal(sent.topk_weights, full.topk_weights), (route, dtype)

    run_ranks(fn, 4)


@pytest.mark.parametrize("payload", _PAYLOADS)
def test_one_rank_rounds_as_many_do(payload: Any) -> None:
    x, idx, weights = _inputs(0)
    full = cc.dispatch(x, idx, weights, num_experts=_E)
    options = MoeOptions(payload=payload)
    sent = cc.dispatch(x, idx, weights, num_experts=_E, options=options)
    assert torch.equal(sent.x, _rounded(full.x, payload))


def _gradients(rank: int, **options: Any) -> tuple[Tensor, Tensor]:
    """Gradients of experts that multiply by a constant: they do not depend on the rows."""
    x, idx, weights = _inputs(rank)
    leaves = x.requires_grad_(), weights.requires_grad_()
    sent = cc.dispatch(
        *(x, idx, weights),
        num_experts=_E,
        group=dist.group.WORLD,
        options=MoeOptions(timeout_s=30, **options),
    )
    generator = torch.Generator().manual_seed(5)
    factor = torch.randn(_D, generator=generator)
    out = cc.combine(sent.x * factor + sent.topk_weights[:, None], sent.handle)
    out.backward(torch.linspace(-1, 1, out.numel()).view_as(out))
    assert leaves[0].grad is not None
    assert leaves[1].grad is not None
    return leaves[0].grad, leaves[1].grad


@pytest.mark.parametrize("payload", _PAYLOADS)
def test_gradients_pass_straight_through_the_rounding(payload: Any) -> None:
    def fn(rank: int, world_size: int) -> None:
        for route in _ROUTES:
            plain, rounded = _gradients(rank, **route), _gradients(rank, payload=payload, **route)
            assert torch.equal(rounded[0], plain[0]), route
            assert torch.equal(rounded[1], plain[1]), route

    run_ranks(fn, 4)


@pytest.mark.parametrize("payload", _PAYLOADS)
def test_gradients_are_rounded_on_request_only(payload: Any) -> None:
    """Close to the plain ones, but not equal; each transfer of a row rounds by at most 1/16."""

    def fn(rank: int, world_size: int) -> None:
        for route in _ROUTES:
            plain = _gradients(rank, **route)
            rounded = _gradients(rank, payload=payload, quantize_backward=True, **route)
            assert rank == 2 or not torch.equal(rounded[0], plain[0]), route
            for got, want in zip(rounded, plain, strict=True):
                error = (got - want).norm() / want.norm().clamp(min=1e-9)
                assert error < 0.1, (route, float(error))

    run_ranks(fn, 4)


def test_rounded_gradients_are_those_of_the_codec() -> None:
    """One choice per token: each gradient row travels alone, once in each exchange."""

    def fn(rank: int, world_size: int) -> None:
        for route in ({"route": "flat"}, {"route": "dedup"}):
            x = torch.randn(6, _D, requires_grad=True)
            idx = torch.arange(6)[:, None] % _E
            sent = cc.dispatch(
                *(x, idx, torch.ones(6, 1)),
                num_experts=_E,
                group=dist.group.WORLD,
                options=MoeOptions(payload="float8_e4m3", quantize_backward=True, **route),
            )
            grad = torch.randn(6, _D)
            cc.combine(sent.x * 3, sent.handle).backward(grad)
            assert x.grad is not None
            want = _rounded(_rounded(grad, "float8_e4m3") * 3, "float8_e4m3")
            assert torch.equal(x.grad, want), route

    run_ranks(fn, 2)


def test_padding_rows_are_never_summed() -> None:
    def fn(rank: int, world_size: int) -> None:
        for route in _ROUTES:
            sent = _dispatch(rank, 8, torch.float32, **route)
            y = sent.x.clone()
            start = 0
            flat = _dispatch(rank, 1, torch.float32, **route)
            for padded, real in zip(
                sent.num_tokens_per_expert, flat.num_tokens_per_expert, strict=True
            ):
                assert not sent.x[start + real : start + padded].any()
                y[start + real : start + padded] = torch.nan
                start += padded
            assert not cc.combine(y, sent.handle).isnan().any(), route

    run_ranks(fn, 4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_sums_of_all_routes_agree_but_for_rounding(dtype: torch.dtype) -> None:
    def fn(rank: int, world_size: int) -> None:
        x, idx, _ = _inputs(rank, dtype)
        count = (idx >= 0).sum(1, keepdim=True)
        for route in _ROUTES:
            sent = _dispatch(rank, 1, dtype, **route)
            out = cc.combine(sent.x, sent.handle)
            assert out.dtype == dtype
            tolerance = 4 * torch.finfo(dtype).eps
            torch.testing.assert_close(out, x * count, rtol=tolerance, atol=1e-6)

    run_ranks(fn, 4)
