"""send and recv: a tensor there and its gradient back, in whatever order the ranks want them."""

import gc
import threading
import time
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import comm_collectives as cc
from comm_collectives.base.wire import DTYPES, as_bytes, dense
from comm_collectives.call.groups.groups import group_state
from comm_collectives.call.pairs.lane import Lane
from comm_collectives.errors import CollectiveTimeoutError, MismatchError, MutatedInputError
from comm_collectives.p2p.send_recv import recv, send
from ranktest import mark, run_ranks, until_marked

_SHAPES: list[tuple[int, ...]] = [(), (3,), (0, 2), (5, 1, 4), (300, 50)]


def _bits(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    top = 2 if dtype == torch.bool else 256
    size = (torch.Size(shape).numel() * dtype.itemsize,)
    flat = torch.randint(0, top, size, generator=torch.Generator(), dtype=torch.uint8)
    return flat.view(dtype).view(shape)


def test_every_dtype_and_shape_arrives() -> None:
    def fn(rank: int, world_size: int) -> None:
        for dtype in DTYPES:
            for shape in _SHAPES:
                want = _bits(dtype, shape)
                if rank == 0:
                    assert send(want, dst=1).numel() == 0
                else:
                    got = recv(src=0)
                    assert (got.dtype, got.shape) == (want.dtype, want.shape)
                    assert torch.equal(as_bytes(got), as_bytes(want)), (dtype, shape)

    run_ranks(fn, 2)


def test_strided_tensor_arrives_and_stays_as_it_is() -> None:
    def fn(rank: int, world_size: int) -> None:
        frame = torch.arange(24.0).view(4, 6)
        if rank == 0:
            send(frame[::2, 1::2].t(), dst=1)
            send(torch.tensor([1 + 2j]).conj(), dst=1)
            assert torch.equal(frame, torch.arange(24.0).view(4, 6))
        else:
            assert torch.equal(recv(src=0), frame[::2, 1::2].t())
            assert dense(recv(src=0)).tolist() == [1 - 2j]

    run_ranks(fn, 2)


def test_gradient_comes_back_through_a_chain_of_ranks() -> None:
    """Against the same three stages in one process, in float64."""
    weights = [torch.full((4, 4), float(i + 2), dtype=torch.float64) for i in range(3)]
    start = torch.randn(3, 4, dtype=torch.float64)

    def oracle() -> list[torch.Tensor]:
        own = [w.clone().requires_grad_() for w in weights]
        y = start
        for w in own:
            y = (y @ w).sin()
        return list(torch.autograd.grad(y.square().sum(), own))

    want = oracle()

    def fn(rank: int, world_size: int) -> None:
        weight = weights[rank].clone().requires_grad_()
        x = start if rank == 0 else recv(src=rank - 1)
        assert x.requires_grad == (rank > 0)
        y = (x @ weight).sin()
        loss = y.square().sum() if rank == 2 else send(y, dst=rank + 1).sum()
        loss.backward()
        assert weight.grad is not None
        assert torch.equal(weight.grad, want[rank])

    run_ranks(fn, 3)


def test_gradients_wait_for_whoever_wants_them() -> None:
    """Backwards in the order of the forwards, transfers in between, and to and fro at once."""

    def fn(rank: int, world_size: int) -> list[float]:
        xs = [torch.tensor([float(i)], requires_grad=True) for i in range(3)]
        if rank == 0:
            tokens = [send(x, dst=1) for x in xs]
            assert cc.recv_tensors(src=1)[0].tolist() == [7]  # behind three gradients
            for token in tokens:
                token.sum().backward()
            assert recv(src=1).tolist() == [8]
            return [float(x.grad) for x in xs if x.grad is not None]
        got = [recv(src=0) for _ in xs]
        sum((i + 1) * y.sum() for i, y in enumerate(got)).backward()
        cc.isend_tensors([torch.tensor([7])], dst=0).wait()
        send(torch.tensor([8]), dst=0)
        return []

    assert run_ranks(fn, 2)[0] == [1, 2, 3]


def test_both_ranks_may_send_first() -> None:
    def fn(rank: int, world_size: int) -> float:
        x = torch.full((1 << 20,), float(rank), requires_grad=True)
        handle = send(x, dst=1 - rank, async_op=True)
        y = recv(src=1 - rank)
        loss = (y * (rank + 1)).sum() + handle.wait().sum()
        loss.backward()
        assert x.grad is not None
        return float(x.grad[0])

    assert run_ranks(fn, 2) == [2, 1]


def test_receive_under_way_does_not_hold_up_collectives() -> None:
    def fn(rank: int, world_size: int) -> list[float]:
        handles = [recv(src=1, async_op=True) for _ in range(2)] if rank == 0 else []
        total = cc.all_reduce(torch.ones(1))
        if rank == 0:
            later = recv(src=1)  # in the order of the calls
            return [*total.tolist(), *(h.wait().item() for h in handles), later.item()]
        for i in range(3):
            send(total + i, dst=0)
        return []

    assert run_ranks(fn, 2)[0] == [2, 2, 3, 4]


def _let_go(y: torch.Tensor) -> None:
    del y
    gc.collect()


@pytest.mark.parametrize("how", ["let go", "no_grad", "as a list", "handle let go"])
def test_result_without_a_backward_sends_zeros(how: str) -> None:
    def receive() -> None:
        if how == "no_grad":
            with torch.no_grad():
                assert not recv(src=0).requires_grad
        elif how == "as a list":
            assert not cc.recv_tensors(src=0)[0].requires_grad
        elif how == "handle let go":
            handle = recv(src=0, async_op=True)
            while not handle.is_done():
                time.sleep(0.01)
            del handle
        else:
            recv(src=0)
        gc.collect()

    def fn(rank: int, world_size: int) -> None:
        x = torch.ones(2, 3, requires_grad=True)
        if rank == 0:
            loss = (x * 2).sum() + send(x, dst=1, timeout_s=20).sum()
            loss.backward(retain_graph=True)
            loss.backward()
            assert x.grad is not None
            assert bool((x.grad == 4).all())
        else:
            receive()
        dist.barrier()

    run_ranks(fn, 2)


def test_gradient_that_nobody_wants_is_discarded() -> None:
    def fn(rank: int, world_size: int) -> None:
        if rank == 0:
            for _ in range(3):
                send(torch.ones(1 << 20, requires_grad=True), dst=1)
            gc.collect()
            assert recv(src=1).tolist() == [5]
            return
        for _ in range(3):
            recv(src=0).sum().backward()
        send(torch.tensor([5]), dst=0)

    run_ranks(fn, 2)


def test_backward_that_raises_ahead_of_what_was_received_is_an_error_at_the_sender() -> None:
    def fails(grad: torch.Tensor) -> None:
        raise ValueError("no memory")

    def fn(rank: int, world_size: int) -> None:
        if rank == 0:
            x = torch.ones(3, requires_grad=True)
            token = send(x * 1, dst=1, timeout_s=30)
            match = "a backward pass of rank 1 ended in an exception ahead of what it had received"
            with pytest.raises(MismatchError, match=match):
                token.sum().backward()
            assert x.grad is None
        else:
            y = recv(src=0) * 2
            y.register_hook(fails)
            with pytest.raises(ValueError, match="no memory"):
                y.sum().backward()
            del y
            gc.collect()
        dist.barrier()

    run_ranks(fn, 2)


def test_nothing_is_kept_of_transfers_whose_graphs_are_gone() -> None:
    def fn(rank: int, world_size: int) -> None:
        for i in range(12):
            if rank == 0:
                token = send(torch.ones(3, requires_grad=True), dst=1)
                if i % 4 < 3:  # else the gradient comes for nobody
                    token.sum().backward()
                del token
            elif i % 4 == 0:
                recv(src=0).sum().backward()
            elif i % 4 == 1:  # zeros are sent
                cc.recv_tensors(src=0)
            else:  # by who lets go, or by who wants no graph
                with torch.set_grad_enabled(i % 4 == 2):
                    recv(src=0)
            gc.collect()
        # Behind all that is under way, in both directions.
        pair = Lane.of(group_state(None)).pairs[1 - rank]
        _ = send(torch.ones(1), dst=1 - rank), recv(src=1 - rank)
        started = time.monotonic()
        while {*pair.sent, *pair.came} != {0}:
            assert time.monotonic() < started + 30, (pair.sent, pair.came)
            time.sleep(0.01)
        dist.barrier()

    run_ranks(fn, 2)


def test_sender_names_a_receiver_that_keeps_the_result_without_a_backward() -> None:
    def fn(rank: int, world_size: int) -> None:
        if rank == 0:
            token = send(torch.ones(1, requires_grad=True), dst=1, timeout_s=0.5)
            match = r"send \(backward\), transfer 1 from rank 0 to rank 1 .* timed out after 0.5 s"
            with pytest.raises(CollectiveTimeoutError, match=match):
                token.sum().backward()
            mark("gave up")
        else:
            kept = recv(src=0)
            until_marked("gave up")
            assert kept.requires_grad

    run_ranks(fn, 2)


def test_input_changed_before_wait_is_noticed() -> None:
    def fn(rank: int, world_size: int) -> None:
        if rank == 0:
            x = torch.ones(4)
            handle = send(x, dst=1, async_op=True)
            x.add_(1)
            with pytest.raises(MutatedInputError, match="send: input 0 was changed in place"):
                handle.wait()
        else:
            recv(src=0)

    run_ranks(fn, 2)


def test_mistakes_are_told_to_who_made_them() -> None:
    calls: list[tuple[Callable[[], object], type[Exception], str]] = [
        (lambda: send(torch.ones(1), dst=0), ValueError, "is this rank itself"),
        (lambda: send(torch.ones(1), dst=2), ValueError, "not a rank of a group of 2"),
        (lambda: recv(src=-1), ValueError, "not a rank of a group of 2"),
        (lambda: recv(src=1, device="tpu9x"), ValueError, "cannot be used"),
        (lambda: recv(src=1, device=3.5), ValueError, "device=3.5 cannot be used"),  # type: ignore[call-overload]
        (lambda: recv(src=1, timeout_s=0), ValueError, "must be positive"),
        (lambda: send([1.0], dst=1), TypeError, "x is a list"),  # type: ignore[call-overload]
    ]

    def fn(rank: int, world_size: int) -> None:
        if rank == 0:
            for call, kind, match in calls:
                with pytest.raises(kind, match=match):
                    call()
            # Its part ends well, also where it reads on after the receiver has raised.
            handles = [cc.isend_tensors([torch.ones(1)] * 2, dst=1) for _ in range(2)]
            handles[0].wait()
            assert recv(src=1).item() == 5
            handles[1].wait()
        else:
            for _ in range(2):
                with pytest.raises(MismatchError, match="a list of 2 tensors arrived"):
                    recv(src=0)
            send(torch.tensor(5), dst=0)
        dist.barrier()

    run_ranks(fn, 2)


@pytest.mark.parametrize("async_op", [False, True])
def test_what_was_received_may_be_changed_in_place(async_op: bool) -> None:
    def fn(rank: int, world_size: int) -> list[float]:
        if rank == 0:
            x = torch.ones(2, requires_grad=True)
            send(x, dst=1).sum().backward()
            assert x.grad is not None
            return x.grad.tolist()
        y = recv(src=0, async_op=True).wait() if async_op else recv(src=0)
        y.mul_(3).sum().backward()
        return y.tolist()

    assert run_ranks(fn, 2) == [[3, 3], [3, 3]]


def test_sparse_gradient_of_what_was_received_comes_whole() -> None:
    def fn(rank: int, world_size: int) -> list[float]:
        x = torch.ones(3, 1, requires_grad=True)
        table = cc.all_reduce(x)
        if rank == 0:
            send(table, dst=1).sum().backward()
        else:
            rows = torch.tensor([0, 2, 2])
            F.embedding(rows, recv(src=0), sparse=True).sum().backward()
            F.embedding(rows, table, sparse=True).sum().backward()
        assert x.grad is not None
        return x.grad.flatten().tolist()

    assert run_ranks(fn, 2) == [[2, 0, 4], [2, 0, 4]]


def test_peers_and_limits_are_numbers_of_any_library() -> None:
    def fn(rank: int, world_size: int) -> None:
        peer, limit = torch.tensor(1 - rank), np.float32(10)
        for _ in range(2):
            handle = send(torch.ones(2), dst=peer, timeout_s=limit, async_op=True)  # type: ignore[call-overload]
            assert recv(src=peer, timeout_s=limit).tolist() == [1, 1]  # type: ignore[call-overload]
            handle.wait(limit)
        threads = threading.active_count()
        cc.isend_tensors([torch.ones(2)], dst=peer)  # type: ignore[arg-type]
        cc.recv_tensors(src=peer)  # type: ignore[arg-type]
        late = Fraction(1, 5) if rank else np.float32(0.2)
        with pytest.raises(CollectiveTimeoutError, match=r"timed out after 0\.2 s"):
            recv(src=peer, timeout_s=late)  # type: ignore[call-overload]
        assert threading.active_count() == threads

    run_ranks(fn, 2)


def test_second_derivative_through_the_receiver_is_an_error() -> None:
    """The sender does not know how the gradient that came depends on what it sent."""

    def fn(rank: int, world_size: int) -> None:
        x = torch.ones(2, requires_grad=True)
        if rank == 1:
            recv(src=0).square().sum().backward()
            return
        (grad,) = torch.autograd.grad(send(x, dst=1).sum(), x, create_graph=True)
        assert grad.tolist() == [2, 2]
        with pytest.raises(RuntimeError, match="differentiate twice"):
            (grad * x).sum().backward()

    run_ranks(fn, 2)
