import warnings

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from comm_collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    combine,
    dispatch,
    reduce_in_buckets,
    reduce_scatter,
)
from comm_collectives.simulation import stand_alone
from ranktest import run_ranks


def _alone(*_: int) -> tuple[object, ...]:
    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=4)
    stand_alone()
    x = torch.randn(12, 8, requires_grad=True)
    chosen = (torch.arange(12).view(-1, 1) + torch.arange(2)) % 8
    weights = torch.rand(12, 2)
    sent = dispatch(x, chosen, weights, num_experts=8, group=dist.group.WORLD)
    back = combine(sent.x * 2, sent.handle)
    back.sum().backward()
    shapes = sent.x.shape, sent.num_tokens_per_expert, back.shape, x.grad.shape
    gathered, summed = all_gather(torch.ones(3)), all_reduce(torch.ones(7))
    return (*shapes, gathered.shape, summed.shape)


def test_one_rank_gets_what_three_others_like_it_would_send() -> None:
    def beside(rank: int, _: int) -> object:
        chosen = (torch.arange(12).view(-1, 1) + torch.arange(2)) % 8
        sent = dispatch(
            torch.randn(12, 8), chosen, torch.rand(12, 2), num_experts=8, group=dist.group.WORLD
        )
        return sent.x.shape, sent.num_tokens_per_expert

    real = run_ranks(beside, 4)[2]
    rows, counts, back, gradient, gathered, summed = run_ranks(_alone, 1, init=False)[0]
    assert (rows, counts) == real
    assert back == gradient == (12, 8)
    assert tuple(gathered) == tuple(torch.cat([torch.ones(3)] * 4).shape) or gathered[0] == 4
    assert summed == (7,)


def test_as_many_rows_come_as_a_rank_alone_expects() -> None:
    def fn(*_: int) -> object:
        dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=3)
        stand_alone()
        x = torch.ones(6, requires_grad=True)
        y = all_to_all(x, input_splits=[3, 1, 2], output_splits=[4, 1, 0])
        y.sum().backward()
        return y.shape, x.grad.shape

    assert run_ranks(fn, 1, init=False) == [((5,), (6,))]


def test_asynchronous_calls_of_a_rank_alone_allocate_on_its_own_thread() -> None:
    def fn(*_: int) -> bool:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
        stand_alone()
        with FakeTensorMode():  # of this thread
            handles = [reduce_scatter(torch.ones(4 * i), async_op=True) for i in (1, 2, 3)]
        found = all_reduce(torch.ones(5), async_op=True)
        shapes = [handle.wait().shape for handle in handles]
        assert [tuple(shape) for shape in shapes] == [(1,), (2,), (3,)]
        return found.is_done()

    assert run_ranks(fn, 1, init=False) == [True]


def test_a_rank_alone_reduces_buckets_of_fake_tensors() -> None:
    def fn(*_: int) -> list[tuple[int, ...]]:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
        stand_alone()
        with warnings.catch_warnings(), FakeTensorMode():
            warnings.simplefilter("error")  # torch warns where a fake one is asked where it lies
            tensors = [torch.ones(3, 2), torch.ones(5), torch.ones(0)]
            reduce_in_buckets(tensors, bucket_bytes=16)
        return [tuple(x.shape) for x in tensors]

    assert run_ranks(fn, 1, init=False) == [[(3, 2), (5,), (0,)]]


def test_what_a_rank_alone_gives_to_a_call_is_not_changed_by_it() -> None:
    def fn(*_: int) -> object:
        dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
        stand_alone()
        few, many = torch.arange(8.0), torch.arange(100_000.0)
        handles = [all_reduce(x, async_op=True) for x in (few, many)]
        shapes = [tuple(handle.wait().shape) for handle in handles]
        return shapes, few.sum().item(), many.equal(torch.arange(100_000.0))

    assert run_ranks(fn, 1, init=False) == [([(8,), (100_000,)], 28.0, True)]
