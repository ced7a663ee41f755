"""all_gather and reduce_scatter against the same rows in one process, bit for bit."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import comm_collectives as cc
from comm_collectives.base.wire import DTYPES, as_bytes, dense
from comm_collectives.collectives.gathers import all_gather, reduce_scatter
from comm_collectives.errors import MismatchError, RefusedError, RefusedTypeError
from ranktest import run_ranks

_OPS = {
    "sum": torch.sum,
    "avg": torch.mean,
    "min": torch.amin,
    "max": torch.amax,
    "product": torch.prod,
}


def _bits(dtype: torch.dtype, rows: int, seed: int) -> torch.Tensor:
    """[rows, 3] of random bits."""
    generator = torch.Generator().manual_seed(seed)
    top = 2 if dtype == torch.bool else 256
    size = (rows, 3 * dtype.itemsize)
    return torch.randint(0, top, size, generator=generator, dtype=torch.uint8).view(dtype)


def _equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    same_kind = a.dtype == b.dtype and a.shape == b.shape
    return same_kind and torch.equal(as_bytes(dense(a)), as_bytes(dense(b)))


@pytest.mark.parametrize("counts", [[2, 2], [3, 0], [0, 0], [40, 41], [500, 7], [0, 4, 1, 300]])
def test_rows_of_every_dtype_are_gathered_by_rank(counts: list[int]) -> None:
    def fn(rank: int, world_size: int) -> None:
        for dtype in DTYPES:
            want = [_bits(dtype, n, seed) for seed, n in enumerate(counts)]
            got = all_gather(want[rank])
            assert _equal_bits(got, _cat(want)), dtype

    def _cat(parts: list[torch.Tensor]) -> torch.Tensor:
        flat = torch.cat([as_bytes(part) for part in parts])
        return flat.view(parts[0].dtype).view(sum(counts), 3)

    run_ranks(fn, len(counts))


def test_strided_rows_are_gathered_and_their_surroundings_kept() -> None:
    def fn(rank: int, world_size: int) -> None:
        frames = [torch.arange(24.0).view(4, 6) + 100 * r for r in range(world_size)]
        x, before = frames[rank][::2, 1::2].t(), frames[rank].clone()
        want = torch.cat([frame[::2, 1::2].t() for frame in frames])
        got = all_gather(x)
        assert torch.equal(got, want)
        got.zero_()
        assert torch.equal(frames[rank], before)
        conj = all_gather(torch.tensor([complex(rank, 1)]).conj())
        assert conj.tolist() == [complex(r, -1) for r in range(world_size)]

    run_ranks(fn, 3)
    run_ranks(fn, 1)


def test_rows_without_elements_keep_their_shape() -> None:
    def fn(rank: int, world_size: int) -> list[tuple[int, ...]]:
        return [
            tuple(all_gather(torch.empty(rank, 0, 2)).shape),
            tuple(reduce_scatter(torch.empty(2, 0)).shape),
            tuple(reduce_scatter(torch.empty(0, 5)).shape),
            tuple(reduce_scatter(torch.ones(3, 5), splits=[3, 0]).shape),
        ]

    assert run_ranks(fn, 2) == [
        [(1, 0, 2), (1, 0), (0, 5), (3, 5)],
        [(1, 0, 2), (1, 0), (0, 5), (0, 5)],
    ]


def _numbers(dtype: torch.dtype, rows: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(-9, 10, (rows, 5), generator=generator)
    return numbers.to(dtype) if dtype.is_signed else numbers.abs().to(dtype)


_INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
_FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
_COMPLEX = [torch.complex64, torch.complex128]


@pytest.mark.parametrize("splits", [None, [1, 5], [6, 0], [400, 2]])
def test_reduced_rows_are_those_of_the_stacked_inputs(splits: list[int] | None) -> None:
    """Small integers, so that every order of summation gives the same number."""
    rows = sum(splits) if splits else 4

    def check(rank: int, world_size: int, op: str, dtype: torch.dtype) -> None:
        kept = splits or [rows // world_size] * world_size
        inputs = [_numbers(dtype, rows, seed) for seed in range(world_size)]
        want = _OPS[op](torch.stack(inputs), 0).to(dtype).split(kept)[rank]
        assert torch.equal(reduce_scatter(inputs[rank], splits=splits, op=op), want), (op, dtype)

    def fn(rank: int, world_size: int) -> None:
        for op in ("sum", "product"):
            for dtype in _INTEGERS + _FLOATS + _COMPLEX:
                check(rank, world_size, op, dtype)
        for op in ("min", "max"):
            for dtype in _INTEGERS + _FLOATS:
                check(rank, world_size, op, dtype)
        for dtype in _FLOATS + _COMPLEX:
            check(rank, world_size, "avg", dtype)

    run_ranks(fn, 2)


def test_unsigned_and_bool_rows_keep_order_and_wrap() -> None:
    def fn(rank: int, world_size: int) -> None:
        for dtype in (torch.uint16, torch.uint32, torch.uint64):
            top = 2 ** (8 * dtype.itemsize)
            values = [[1, top - 1, 5, 0], [2, top - 3, top // 2, 7]]
            columns = list(zip(*values, strict=True))
            x = torch.tensor(values[rank], dtype=dtype)
            mine = slice(2 * rank, 2 * rank + 2)
            assert reduce_scatter(x).tolist() == [sum(c) % top for c in columns][mine]
            assert reduce_scatter(x, op="max").tolist() == [max(c) for c in columns][mine]
            assert reduce_scatter(x, op="min").tolist() == [min(c) for c in columns][mine]
        flags = torch.tensor([True, rank == 0])
        assert reduce_scatter(flags, op="max").tolist() == [True]
        assert reduce_scatter(flags, op="product").tolist() == [rank == 0]

    run_ranks(fn, 2)


def test_sixteen_bit_sums_are_rounded_once() -> None:
    def fn(rank: int, world_size: int) -> list[float]:
        # In bfloat16 256 + 1 is 256 again, each time.
        x = torch.full((world_size,), [256.0, 1.0, 1.0, 1.0][rank], dtype=torch.bfloat16)
        return reduce_scatter(x).tolist()

    assert run_ranks(fn, 4) == [[260.0]] * 4


@pytest.mark.parametrize("columns", [1, 200])
def test_sums_have_the_same_bits_for_every_split(columns: int) -> None:
    seed = random.randrange(10**9)

    def fn(rank: int, world_size: int) -> None:
        generator = torch.Generator().manual_seed(seed + rank)
        x = torch.randn(9, columns, generator=generator)
        whole = all_gather(reduce_scatter(x))
        for splits in ([9, 0, 0], [0, 2, 7], [4, 4, 1]):
            again = all_gather(reduce_scatter(x, splits=splits))
            assert torch.equal(whole, again), f"seed {seed}"

    run_ranks(fn, 3)


def test_async_calls_return_the_same() -> None:
    def fn(rank: int, world_size: int) -> None:
        x = torch.arange(4.0) + rank
        handles = [all_gather(x, async_op=True), reduce_scatter(x, op="max", async_op=True)]
        want = [all_gather(x), reduce_scatter(x, op="max")]
        assert [h.wait().tolist() for h in handles] == [w.tolist() for w in want]

    run_ranks(fn, 2)


def test_input_without_dims_is_refused_with_a_remedy() -> None:
    def fn(rank: int, world_size: int) -> None:
        x = torch.tensor(1.0) if rank == 1 else torch.ones(2)
        with pytest.raises(RefusedError, match=r"rank 1: x has no dims.*give x\.reshape\(1\)"):
            all_gather(x)
        with pytest.raises(RefusedError, match=r"rank 1: x has no dims.*give x\.reshape\(1\)"):
            reduce_scatter(x)

    run_ranks(fn, 2, timeout_s=20)


_MISTAKES = [
    ({"x": torch.ones(3)}, "3 rows, which 2 ranks cannot share evenly; give splits"),
    ({"splits": [1, 2]}, r"splits=\[1, 2\] sum to 3 but x has 2 rows"),
    ({"splits": [2]}, "must hold 2 row counts"),
    ({"op": "mean"}, "choose one of sum, avg"),
    ({"x": torch.ones(2, dtype=torch.bool)}, "op='sum' is not defined for torch.bool"),
    ({"x": [1.0, 2.0]}, "x is a list"),
]


def test_mistakes_of_one_rank_end_the_call_on_every_rank() -> None:
    def fn(rank: int, world_size: int) -> None:
        for odd, match in _MISTAKES:
            is_type = "not defined" in match or "list" in match
            given: dict[str, object] = {"x": torch.ones(2)} | (odd if rank == 0 else {})
            with pytest.raises(RefusedTypeError if is_type else RefusedError, match=match):
                reduce_scatter(**given)  # type: ignore[call-overload]
            assert all_gather(torch.ones(1)).tolist() == [1, 1]

    run_ranks(fn, 2, timeout_s=20)


_DIFFERENCES = [
    ({"x": torch.ones(2, 3).int()}, "dtype differs"),
    ({"x": torch.ones(2, 1, 3)}, "row shape"),
    ({"x": torch.ones(2, 3), "splits": [2, 0]}, "splits differs"),
    ({"x": torch.ones(2, 3), "op": "max"}, "op differs"),
]


def test_ranks_that_differ_are_told_so() -> None:
    def fn(rank: int, world_size: int) -> None:
        for odd, match in _DIFFERENCES:
            given: dict[str, object] = odd if rank == 1 else {"x": torch.ones(2, 3)}
            with pytest.raises(MismatchError, match=match):
                reduce_scatter(**given)  # type: ignore[call-overload]
        with pytest.raises(MismatchError, match=r"row shape=\(3,\).*row shape=\(3, 1\)"):
            all_gather(torch.ones(2, 3) if rank == 0 else torch.ones(4, 3, 1))

    run_ranks(fn, 2, timeout_s=20)


@pytest.mark.parametrize("async_op", [False, True])
def test_results_made_without_gradients_may_be_changed_in_place_with_them(async_op: bool) -> None:
    calls: list[Callable[..., Any]] = [
        cc.all_reduce,
        cc.all_gather,
        cc.all_to_all,
        cc.reduce_scatter,
        lambda x, **options: cc.broadcast(x, src=0, **options),
        lambda x, **options: cc.gather(x, dst=0, **options),
        lambda x, **options: cc.gather(x.sum(), dst=0, **options),
        lambda x, **options: cc.scatter([x, x], src=0, **options),
    ]

    def fn(rank: int, world_size: int) -> None:
        for call in calls:
            with torch.no_grad():
                got = call(torch.ones(4), async_op=async_op)
                got = got.wait() if async_op else got
            for y in got if isinstance(got, list) else [] if got is None else [got]:
                weight = torch.tensor(3.0, requires_grad=True)
                want = float(y.sum())
                y.mul_(weight).sum().backward()
                assert weight.grad is not None and float(weight.grad) == want

    run_ranks(fn, 2)
