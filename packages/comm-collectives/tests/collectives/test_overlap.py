"""Gradients are reduced during the backward, all of them, also those that a rank does not have."""

import pytest
import torch
from torch import nn

import comm_collectives as cc
from comm_collectives.collectives.overlap import overlap_gradients
from comm_collectives.errors import CommTypeError
from ranktest import run_ranks


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 2))


def _input(rank: int) -> torch.Tensor:
    return torch.randn(4 + rank, 5, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("bucket_bytes", [1, 100, 1 << 20])
def test_gradients_equal_those_reduced_afterwards(op: str, bucket_bytes: int) -> None:
    def fn(rank: int, world_size: int) -> None:
        model, plain = _model(), _model()
        reducer = overlap_gradients(model.parameters(), op=op, bucket_bytes=bucket_bytes)
        for step in range(2):
            model.zero_grad()
            plain.zero_grad()
            with reducer:
                model(_input(rank + step)).square().sum().backward()
            plain(_input(rank + step)).square().sum().backward()
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(p.grad, cc.all_reduce(q.grad, op=op))

    run_ranks(fn, 3)


class _Spy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, look):
        ctx.look = look
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.look()
        return grad, None


def test_buckets_are_under_way_before_the_backward_ends() -> None:
    def fn(rank: int, world_size: int) -> tuple[list[int], int, int]:
        model = _model()
        reducer = overlap_gradients(model.parameters(), bucket_bytes=1)
        started: list[int] = []
        with reducer:
            x = _Spy.apply(_input(rank).requires_grad_(), lambda: started.append(-1))
            y = _Spy.apply(model[0](x), lambda: started.append(reducer.num_started))
            model[1:](y).sum().backward()
        return started, reducer.num_started, reducer.num_buckets

    # When the gradient reaches the first layer, the four buckets behind it have been sent.
    assert run_ranks(fn, 2) == [([4, -1], 6, 6)] * 2


def test_parameter_without_gradient_on_one_rank_gets_that_of_the_others() -> None:
    def fn(rank: int, world_size: int) -> list[object]:
        used, unused, other = (nn.Parameter(torch.zeros(2)) for _ in range(3))
        with overlap_gradients([used, other, unused], op="sum", bucket_bytes=1):
            loss = (used * (rank + 1)).sum()
            if rank == 1:
                loss = loss + (other * 5).sum()
            loss.backward()
        return [None if p.grad is None else p.grad.tolist() for p in (used, other, unused)]

    assert run_ranks(fn, 2) == [[[3.0, 3.0], [5.0, 5.0], None]] * 2


def test_rank_whose_loss_uses_no_parameter_still_takes_part() -> None:
    def fn(rank: int, world_size: int) -> list[float]:
        weight = nn.Parameter(torch.ones(3))
        with overlap_gradients([weight], op="sum"):
            if rank == 0:
                weight.sum().backward()
        return weight.grad.tolist()

    assert run_ranks(fn, 2) == [[1.0, 1.0, 1.0]] * 2


def test_gradients_of_earlier_backwards_are_kept_and_reduced_once() -> None:
    def fn(rank: int, world_size: int) -> float:
        weight = nn.Parameter(torch.ones(()))
        (weight * (rank + 1)).backward()
        with overlap_gradients([weight], op="sum"):
            (weight * 10).backward()
        return float(weight.grad)

    assert run_ranks(fn, 2) == [23.0, 23.0]


def test_second_backward_inside_is_refused() -> None:
    weight = nn.Parameter(torch.ones(()))
    other = nn.Parameter(torch.ones(()))

    def fn(rank: int, world_size: int) -> None:
        with (
            pytest.raises(ValueError, match="a second backward ran inside the block"),
            overlap_gradients([weight, other], bucket_bytes=1),
        ):
            (weight * 2).backward()
            (weight * 2).backward()

    run_ranks(fn, 1)


def test_mistakes_are_refused_before_anything_is_sent() -> None:
    def fn(rank: int, world_size: int) -> None:
        weight = nn.Parameter(torch.zeros(2))
        with pytest.raises(ValueError, match="no parameter needs a gradient"):
            overlap_gradients([nn.Parameter(torch.zeros(2), requires_grad=False)])
        with pytest.raises(ValueError, match="occurs twice"):
            overlap_gradients([weight, weight])
        with pytest.raises(ValueError, match="bucket_bytes=0"):
            overlap_gradients([weight], bucket_bytes=0)
        with pytest.raises(ValueError, match="op='max'"):
            overlap_gradients([weight], op="max")
        for dtype in torch.int32, torch.complex64, "float32":
            with pytest.raises(CommTypeError, match="holds no gradients of"):
                overlap_gradients([weight], op="sum", dtype=dtype)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"gradient_of returns shape \[3\] for a parameter"):
            overlap_gradients([weight], gradient_of=lambda p: torch.ones(3))
        with pytest.raises(CommTypeError, match="what gradient_of returns is a NoneType"):
            overlap_gradients([weight], gradient_of=lambda p: p.grad)  # type: ignore[arg-type, return-value]
        reducer = overlap_gradients([weight])
        with reducer, pytest.raises(ValueError, match="already open"):
            reducer.__enter__()

    run_ranks(fn, 1)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_buffers_that_several_backwards_fill_are_reduced_when_said_to_be_complete(
    dtype: torch.dtype | None,
) -> None:
    def fn(rank: int, world_size: int) -> tuple[list[int], dict[str, torch.Tensor]]:
        held = {name: nn.Parameter(torch.zeros(3, dtype=torch.bfloat16)) for name in "abc"}
        sums = {p: torch.zeros(3) for p in held.values()}
        reducer = overlap_gradients(
            held.values(), op="sum", bucket_bytes=1, gradient_of=sums.__getitem__, dtype=dtype
        )
        started = []
        for _ in range(2):  # a reducer is for every step
            for buffer in sums.values():
                buffer.zero_()
            with reducer:
                for backward in (1, 2):
                    for number, buffer in enumerate(sums.values()):
                        buffer.add_((rank + 1) * (number + 1) * backward / 3)
                reducer.ready(held["b"])
                started.append(reducer.num_started)  # c goes first
                reducer.ready(held["c"])
                started.append(reducer.num_started)
            started.append(reducer.num_started)
            assert all(p.grad is None for p in held.values())
        return started, {name: sums[p] for name, p in held.items()}

    for started, sums in run_ranks(fn, 2):
        assert started == [0, 2, 3] * 2
        for number, found in enumerate(sums.values(), start=1):
            sent = [torch.full((3,), (rank + 1.0) * number) for rank in (0, 1)]
            expected = sum(t.to(dtype or torch.float32) for t in sent).float()
            torch.testing.assert_close(found, expected)


def test_what_is_complete_is_only_said_inside_the_block_and_of_gradients_kept_elsewhere() -> None:
    def fn(rank: int, world_size: int) -> None:
        weight = nn.Parameter(torch.zeros(2))
        with pytest.raises(ValueError, match="observed as it comes"):
            overlap_gradients([weight]).ready(weight)
        told = overlap_gradients([weight], op="sum", gradient_of=lambda p: torch.ones(2))
        with pytest.raises(ValueError, match="not reduced outside the block"):
            told.ready(weight)
        with pytest.raises(ValueError, match="none of those that the reducer was given"), told:
            told.ready(nn.Parameter(torch.zeros(2)))
        with pytest.raises(ValueError, match="once a block"), told:
            told.ready(weight)
            told.ready(weight)

    run_ranks(fn, 1)


def test_sparse_gradients_are_refused_by_name() -> None:
    def fn(rank: int, world_size: int) -> None:
        table = nn.Embedding(3, 2, sparse=True)
        with (
            pytest.raises(CommTypeError, match="a gradient has layout"),
            overlap_gradients(table.parameters()),
        ):
            table(torch.tensor([1])).sum().backward()

    run_ranks(fn, 1)


def test_parameters_may_be_without_memory_between_steps() -> None:
    def fn(rank: int, world_size: int) -> None:
        model, plain = _model(), _model()
        values = [p.detach().clone() for p in model.parameters()]
        for p in model.parameters():
            p.untyped_storage().resize_(0)  # as FSDP frees them
        reducer = overlap_gradients(model.parameters(), op="sum", bucket_bytes=100)
        for p, value in zip(model.parameters(), values, strict=True):
            p.untyped_storage().resize_(value.nbytes)
            p.detach().copy_(value)
        with reducer:
            model(_input(rank)).square().sum().backward()
        plain(_input(rank)).square().sum().backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, cc.all_reduce(q.grad, op="sum"))

    run_ranks(fn, 2)
