"""A list of tensors is reduced in place, in few calls, with what all_reduce makes of each."""

from collections.abc import Callable

import pytest
import torch

import comm_collectives as cc
from comm_collectives.call.groups import group_state
from comm_collectives.collectives import reduce_in_buckets
from comm_collectives.collectives.buckets import fill_buckets
from comm_collectives.errors import MismatchError
from ranktest import run_ranks


def _tensors(rank: int) -> list[torch.Tensor]:
    """Several shapes and dtypes, interleaved, one strided, two empty."""
    make = torch.Generator().manual_seed(rank)
    floats = [torch.randn(shape, generator=make) for shape in [(3, 4), (0, 2), (), (5,), (7, 2)]]
    halves = [torch.randn(n, generator=make).bfloat16() for n in (6, 1, 0)]
    strided = torch.randn(4, 6, generator=make).t()[::2]
    return [floats[0], halves[0], *floats[1:4], halves[1], strided, halves[2], floats[4]]


@pytest.mark.parametrize("bucket_bytes", [1, 40, 1 << 20])
@pytest.mark.parametrize("op", ["sum", "avg", "max"])
def test_each_tensor_holds_what_all_reduce_returns(op: str, bucket_bytes: int) -> None:
    def fn(rank: int, world_size: int) -> None:
        tensors = _tensors(rank)
        places = [t.data_ptr() for t in tensors]
        reduce_in_buckets(tensors, op=op, bucket_bytes=bucket_bytes)
        assert [t.data_ptr() for t in tensors] == places
        for got, own in zip(tensors, _tensors(rank), strict=True):
            assert torch.equal(got, cc.all_reduce(own, op=op))

    run_ranks(fn, 3)


def test_one_call_is_made_for_each_bucket() -> None:
    def fn(rank: int, world_size: int) -> list[int]:
        numbers = []
        for bucket_bytes in (1 << 20, 40, 1):
            before = group_state(None).next_call()
            reduce_in_buckets(_tensors(rank), bucket_bytes=bucket_bytes)
            numbers.append(group_state(None).next_call() - before - 1)
        return numbers

    assert run_ranks(fn, 2) == [[2, 5, 9]] * 2


def test_leaves_that_require_gradients_are_reduced_without_a_graph() -> None:
    def fn(rank: int, world_size: int) -> None:
        weight = torch.nn.Parameter(torch.full((3,), float(rank + 1)))
        reduce_in_buckets([weight])
        assert weight.tolist() == [3.0] * 3
        assert weight.is_leaf

    run_ranks(fn, 2)


def test_tensors_of_inference_mode_are_reduced_outside_of_it() -> None:
    def fn(rank: int, world_size: int) -> list[float]:
        with torch.inference_mode():
            x = torch.full((2,), rank + 1.0)
        reduce_in_buckets([x])
        return x.tolist()

    assert run_ranks(fn, 2) == [[3.0, 3.0]] * 2


def test_empty_list_on_every_rank_is_fine_and_on_one_rank_is_named() -> None:
    def fn(rank: int, world_size: int) -> None:
        reduce_in_buckets([])
        with pytest.raises(MismatchError, match="shape"):
            reduce_in_buckets([torch.ones(2)] if rank else [], timeout_s=30)

    run_ranks(fn, 2)


def test_parts_of_one_tensor_that_lie_beside_each_other_are_reduced_once() -> None:
    def fn(rank: int, world_size: int) -> list[list[float]]:
        whole, columns = torch.ones(5), torch.ones(2, 2)
        parts = [whole[2:], whole[:2], whole[5:], columns[:, 0], columns[:, 1]]
        reduce_in_buckets(parts, bucket_bytes=1)
        return [whole.tolist(), columns.flatten().tolist()]

    assert run_ranks(fn, 2) == [[[2.0] * 5, [2.0] * 4]] * 2


def test_group_of_some_ranks_reduces_over_those() -> None:
    def fn(rank: int, world_size: int) -> float:
        groups = [torch.distributed.new_group([0, 1]), torch.distributed.new_group([2])]
        x = torch.tensor(float(rank + 1))
        reduce_in_buckets([x], group=groups[rank // 2])
        return float(x)

    assert run_ranks(fn, 3) == [3.0, 3.0, 3.0]


def _not_a_list() -> object:
    return torch.ones(2)


def _twice() -> object:
    return [torch.ones(2)] * 2


def _overlapping() -> object:
    whole = torch.ones(8)
    return [whole[6:], torch.ones(2), whole[:7]]


def _not_a_tensor() -> object:
    return [torch.ones(2), "x"]


@pytest.mark.parametrize(
    ("make", "options", "kind", "text"),
    [
        (_not_a_list, {}, TypeError, "give a list of tensors"),
        (_not_a_tensor, {}, TypeError, r"tensors\[1\] is a str"),
        (_twice, {}, ValueError, "occurs twice"),
        (_overlapping, {}, ValueError, r"tensors\[0\] and tensors\[2\] share memory"),
        (lambda: [torch.ones(1).expand(2)], {}, ValueError, r"of tensors\[0\] may share memory"),
        (list, {"bucket_bytes": 0}, ValueError, "bucket_bytes=0"),
        (list, {"bucket_bytes": "8"}, TypeError, "bucket_bytes='8'"),
        (lambda: [torch.ones(2)], {"op": "mean"}, ValueError, "op='mean'"),
        (lambda: [torch.ones(2, dtype=torch.bool)], {"op": "sum"}, TypeError, "not defined"),
        (list, {"timeout_s": -1.0}, ValueError, "timeout_s=-1"),
    ],
)
def test_mistake_of_one_rank_is_refused_on_every_rank(
    make: Callable[[], object], options: dict[str, object], kind: type[Exception], text: str
) -> None:
    def fn(rank: int, world_size: int) -> list[float]:
        own = [torch.ones(2)]
        with pytest.raises(kind, match=text) as caught:
            if rank == 1:
                reduce_in_buckets(make(), **options)
            else:
                reduce_in_buckets(own, timeout_s=30)
        assert isinstance(caught.value, cc.CommError)
        return own[0].tolist()

    assert run_ranks(fn, 2) == [[1.0, 1.0]] * 2


def test_buckets_hold_one_dtype_and_at_most_their_bytes() -> None:
    a, b, c = (torch.zeros(4) for _ in range(3))
    double = torch.zeros(1, dtype=torch.float64)
    buckets = fill_buckets([a, double, b, c], bucket_bytes=32)
    assert [[id(t) for t in bucket] for bucket in buckets] == [
        [id(a), id(b)],
        [id(double)],
        [id(c)],
    ]
