"""all_reduce against the same arithmetic on stacked inputs in one process."""

import pytest
import torch
import torch.distributed as dist

import comm_collectives as cc
from ranktest import run_ranks

_NUMBERS = torch.tensor([[3, -7, 120], [1, 0, -128]])


def _input(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return (_NUMBERS + 5 * rank).to(dtype)


@pytest.mark.parametrize("op", ["sum", "min", "max", "product"])
def test_integers_wrap_as_torch_does(op: str) -> None:
    dtypes = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
    reduce = {"sum": torch.sum, "min": torch.amin, "max": torch.amax, "product": torch.prod}[op]

    def fn(rank: int, world_size: int) -> None:
        for dtype in dtypes:
            stacked = torch.stack([_input(r, dtype) for r in range(world_size)])
            want = reduce(stacked, 0).to(dtype)
            got = cc.all_reduce(_input(rank, dtype), op=op)
            assert got.dtype == dtype
            assert torch.equal(got, want), (op, dtype)

    run_ranks(fn, 2)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_wide_unsigned_integers_keep_order_and_wrap(dtype: torch.dtype) -> None:
    top = 2 ** (8 * dtype.itemsize)
    values = [[1, top - 1, 5], [2, top - 3, top // 2]]

    def fn(rank: int, world_size: int) -> list[list[int]]:
        x = torch.tensor(values[rank], dtype=dtype)
        return [cc.all_reduce(x, op=op).tolist() for op in ("sum", "min", "max")]

    columns = list(zip(*values, strict=True))
    want = [[sum(c) % top for c in columns], [min(c) for c in columns], [max(c) for c in columns]]
    assert run_ranks(fn, 2) == [want, want]


def test_strided_input_gives_right_sum_and_keeps_its_surroundings() -> None:
    def fn(rank: int, world_size: int) -> None:
        frame = torch.arange(24.0).view(4, 6) + rank
        before = frame.clone()
        got = cc.all_reduce(frame[::2, 1::2].t())
        assert torch.equal(got, (2 * torch.arange(24.0).view(4, 6) + 1)[::2, 1::2].t())
        assert torch.equal(frame, before)

    run_ranks(fn, 2)


def test_average_of_floats_and_complex() -> None:
    def fn(rank: int, world_size: int) -> tuple[float, complex]:
        real = cc.all_reduce(torch.tensor(float(rank)), op="avg")
        pair = cc.all_reduce(torch.tensor(complex(rank, 2)).conj(), op="avg")
        return real.item(), pair.item()

    assert run_ranks(fn, 4) == [(1.5, complex(1.5, -2))] * 4


def test_bools_are_or_and_and() -> None:
    def fn(rank: int, world_size: int) -> list[list[bool]]:
        x = torch.tensor([True, rank == 0, False])
        return [cc.all_reduce(x, op=op).tolist() for op in ("max", "min", "product")]

    want = [[True, True, False], [True, False, False], [True, False, False]]
    assert run_ranks(fn, 2) == [want, want]


@pytest.mark.parametrize(
    ("dtype", "op"),
    [
        (torch.float8_e4m3fn, "sum"),
        (torch.bool, "sum"),
        (torch.int64, "avg"),
        (torch.complex64, "max"),
        (torch.complex32, "min"),
    ],
)
def test_undefined_arithmetic_is_the_same_type_error_everywhere(
    dtype: torch.dtype, op: str
) -> None:
    def fn(rank: int, world_size: int) -> None:
        dist.barrier()
        with pytest.raises(TypeError, match=f"op='{op}' is not defined for {dtype}"):
            cc.all_reduce(torch.zeros(2, dtype=torch.uint8).repeat(8).view(dtype), op=op)

    run_ranks(fn, 2)


_COUNTS = [1, 3, 500]


@pytest.mark.parametrize("world_size", [2, 3])
def test_extremes_keep_a_nan_of_any_rank(world_size: int) -> None:
    """Gloo loses it, depending on the rank that has it."""

    def fn(rank: int, world_size: int) -> None:
        for count in _COUNTS:
            for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
                x = torch.full((world_size, count), float(rank), dtype=dtype)
                x[rank] = torch.nan  # rank r has it in row r
                for op in ("min", "max"):
                    assert bool(cc.all_reduce(x, op=op).isnan().all()), (count, dtype, op)

    run_ranks(fn, world_size)


def test_complex_products_and_half_complex_sums() -> None:
    def fn(rank: int, world_size: int) -> None:
        for count in _COUNTS:
            x = torch.full((count,), complex(1 + rank, 2), dtype=torch.complex64)
            assert torch.equal(
                cc.all_reduce(x, op="product"), torch.full_like(x, (1 + 2j) * (2 + 2j))
            )
            pairs = torch.tensor([1.5 + rank, 2.0]).half().repeat(count, 1)
            total = cc.all_reduce(torch.view_as_complex(pairs))
            assert total.dtype == torch.complex32
            want = torch.tensor([4.0, 4.0]).half().repeat(count, 1)
            assert torch.equal(torch.view_as_real(total), want)

    run_ranks(fn, 2)


@pytest.mark.parametrize("op", ["sum", "avg", "min", "max", "product"])
def test_numbers_of_any_count_are_reduced_alike_on_every_rank(op: str) -> None:
    """Small ones travel with the control exchange, and some reductions are made in pieces."""
    reduce = {
        "sum": torch.sum,
        "avg": torch.mean,
        "min": torch.amin,
        "max": torch.amax,
        "product": torch.prod,
    }[op]

    def fn(rank: int, world_size: int) -> None:
        for count in (0, 1, 2, 49, 1000):
            inputs = [
                torch.randn(count, generator=torch.Generator().manual_seed(r)).double()
                for r in range(world_size)
            ]
            got = cc.all_reduce(inputs[rank], op=op)
            want = reduce(torch.stack(inputs), 0)
            assert torch.allclose(got, want, rtol=1e-15), (op, count)
            assert torch.equal(cc.all_reduce(got, op="max"), cc.all_reduce(got, op="min"))

    run_ranks(fn, 3)


def test_unknown_op_lists_the_known_ones() -> None:
    def fn(rank: int, world_size: int) -> None:
        with pytest.raises(ValueError, match="choose one of sum, avg, min, max, product"):
            cc.all_reduce(torch.zeros(1), op="mean")

    run_ranks(fn, 1)


def test_one_rank_gets_a_new_tensor() -> None:
    def fn(rank: int, world_size: int) -> None:
        x = torch.ones(2)
        cc.all_reduce(x).zero_()
        assert x.tolist() == [1, 1]

    run_ranks(fn, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_first_call_of_a_group_rounds_as_later_ones(dtype: torch.dtype) -> None:
    def fn(rank: int, world_size: int) -> None:
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(20_000, generator=generator).to(dtype)
        first, second, third = (cc.all_reduce(x) for _ in range(3))
        assert torch.equal(first, second)
        assert torch.equal(second, third)

    run_ranks(fn, 4)
