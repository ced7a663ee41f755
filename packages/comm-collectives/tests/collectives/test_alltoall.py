"""all_to_all: every (source, destination, row) has a value of its own, so misplaced rows show."""

import random
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import comm_collectives as cc
from comm_collectives.errors import MismatchError, RefusedError
from ranktest import run_ranks


def _value(src: int, dst: int, rows: int) -> torch.Tensor:
    return 1000 * src + 100 * dst + torch.arange(rows)[:, None] + torch.tensor([0.0, 0.5])


@pytest.mark.parametrize("world_size", [2, 4])
def test_rows_arrive_by_source_for_random_splits(world_size: int) -> None:
    seed = random.randrange(10**9)
    generator = torch.Generator().manual_seed(seed)
    splits = torch.randint(0, 4, (world_size, world_size), generator=generator).tolist()
    splits[0] = [0] * world_size  # one rank has nothing for anyone

    def fn(rank: int, world_size: int) -> None:
        x = torch.cat([_value(rank, dst, n) for dst, n in enumerate(splits[rank])])
        want = torch.cat([_value(src, rank, splits[src][rank]) for src in range(world_size)])
        received = [splits[src][rank] for src in range(world_size)]
        for output_splits in (None, received):
            y = cc.all_to_all(x, input_splits=splits[rank], output_splits=output_splits)
            assert torch.equal(y, want), f"seed {seed}"

    run_ranks(fn, world_size)


def test_even_splits_are_the_default() -> None:
    def fn(rank: int, world_size: int) -> list[int]:
        return cc.all_to_all(torch.tensor([10 * rank, 10 * rank + 1])).tolist()

    assert run_ranks(fn, 2) == [[0, 10], [1, 11]]


def test_alltoall_accepts_zero_rows() -> None:
    def fn(rank: int, world_size: int) -> tuple[int, ...]:
        return tuple(cc.all_to_all(torch.empty(0, 3, 2)).shape)

    assert run_ranks(fn, 4) == [(0, 3, 2)] * 4


def test_input_is_not_aliased_or_modified() -> None:
    def fn(rank: int, world_size: int) -> None:
        x = torch.ones(2)
        y = cc.all_to_all(x)
        y.zero_()
        assert x.tolist() == [1, 1]

    run_ranks(fn, 2)
    run_ranks(fn, 1)


def test_gradcheck_for_uneven_splits() -> None:
    # Once here, so that the forked ranks need not import what gradcheck imports.
    assert torch.autograd.gradcheck(torch.sin, torch.ones(1).double().requires_grad_())

    def fn(rank: int, world_size: int) -> None:
        splits = [[2, 1], [0, 3]][rank]
        x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(_chained, (x, splits), fast_mode=True)

    def _chained(x: torch.Tensor, splits: list[int]) -> torch.Tensor:
        # Everyone's output depends on everyone's input only through rows that come back, so the
        # numerical derivative of one rank is right although the ranks perturb at the same time.
        there = cc.all_to_all(x, input_splits=splits)
        back = [[2, 0], [1, 3]][dist.get_rank()]
        return cc.all_to_all(there * 3, input_splits=back, output_splits=splits).square()

    run_ranks(fn, 2)


def test_gradient_goes_back_to_the_sender() -> None:
    def fn(rank: int, world_size: int) -> list[float]:
        x = torch.zeros(3, requires_grad=True)
        y = cc.all_to_all(x, input_splits=[[1, 2], [3, 0]][rank])
        (y * (rank + 1)).sum().backward()
        assert x.grad is not None
        return x.grad.tolist()

    assert run_ranks(fn, 2) == [[1, 2, 2], [1, 1, 1]]


def test_backward_reaches_rank_without_rows() -> None:
    def fn(rank: int, world_size: int) -> list[float]:
        x = torch.zeros(2 * rank, 1, requires_grad=True)
        y = cc.all_to_all(x, input_splits=[2 * rank, 0])
        y.sum().backward()
        assert x.grad is not None
        return x.grad.flatten().tolist()

    assert run_ranks(fn, 2) == [[], [1, 1]]


def test_mistakes_of_one_rank_end_the_call_on_every_rank() -> None:
    def fn(rank: int, world_size: int) -> str:
        splits = [1, 1] if rank == 0 else [2, 1]
        with pytest.raises(RefusedError) as caught:
            cc.all_to_all(torch.zeros(2), input_splits=splits)
        return str(caught.value)

    texts = run_ranks(fn, 2, timeout_s=10)
    for rank, text in enumerate(texts):
        assert str(text).startswith(
            f"rank {rank}: all_to_all call 1 of group (0, 1) refused: rank 1: input_splits=[2, 1] "
            "sum to 3 but x has 2 rows"
        )


_ROWS = [torch.zeros(4, 6), torch.zeros(4, 6).half(), torch.zeros(4, 3, 2), torch.zeros(4, 5)]


def test_rows_of_another_kind_are_refused_on_every_rank() -> None:
    def fn(rank: int, world_size: int) -> None:
        for odd in _ROWS[1:]:
            what = "dtype" if odd.dtype == torch.float16 else "row shape"
            with pytest.raises(MismatchError, match=f"{what} differs between ranks"):
                cc.all_to_all(odd if rank == 1 else _ROWS[0])

    run_ranks(fn, 2, timeout_s=10)


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"x": torch.zeros(3)}, "3 rows, which 2 ranks cannot share evenly"),
        ({"x": torch.zeros(3), "input_splits": [3]}, r"must hold 2 row counts"),
        ({"x": torch.zeros(3), "input_splits": [4, -1]}, r"must hold 2 row counts"),
        ({"x": torch.zeros(())}, "x has no dims"),
        ({"x": torch.zeros(2), "input_splits": [1, 1], "output_splits": [1]}, "output_splits"),
    ],
)
def test_wrong_splits_raise_value_error(kwargs: dict[str, object], match: str) -> None:
    def fn(rank: int, world_size: int) -> None:
        dist.barrier()
        with pytest.raises(ValueError, match=match):
            cc.all_to_all(**kwargs)

    run_ranks(fn, 2, timeout_s=10)


def test_sparse_tensors_and_lists_raise_type_error() -> None:
    def fn(rank: int, world_size: int) -> None:
        with pytest.raises(TypeError, match="give a dense tensor"):
            cc.all_to_all(torch.eye(2).to_sparse())
        with pytest.raises(TypeError, match="x is a list"):
            cc.all_to_all([1, 2])  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="must be a sequence of integers"):
            cc.all_to_all(torch.zeros(2), input_splits=["a", None])  # type: ignore[list-item]

    run_ranks(fn, 1)


def test_no_process_group_says_what_to_do() -> None:
    def fn(rank: int, world_size: int) -> None:
        with pytest.raises(ValueError, match=r"call torch\.distributed"):
            cc.all_to_all(torch.zeros(2))

    run_ranks(fn, 1, init=False)


def test_results_may_be_changed_in_place_and_gradients_stay_right() -> None:
    def fn(rank: int, world_size: int) -> None:
        x = torch.arange(4.0, requires_grad=True)
        split = [4 // world_size] * world_size
        calls: list[tuple[Callable[[], torch.Tensor], int]] = [
            (lambda: cc.all_to_all(x, input_splits=split), 1),
            (lambda: cc.all_gather(x), world_size),
            (lambda: cc.all_reduce(x), world_size),
            (lambda: cc.reduce_scatter(x), 1),
        ]
        for call, uses in calls:  # of each number of x, on all ranks
            y = call()
            kept = y.detach().clone()
            y += 1
            y *= 2
            assert torch.equal(y, 2 * (kept + 1))
            (grad,) = torch.autograd.grad(y.sum(), x)
            assert torch.equal(x.detach(), torch.arange(4.0))
            assert grad.tolist() == [2.0 * uses] * 4

    run_ranks(fn, 1)
    run_ranks(fn, 2)
