"""Gradients of every collective, against torch in one process; and ranks that do not use an output.

The oracle computes the outputs of all ranks from the inputs of all ranks in one process. The loss
of a rank is its outputs times fixed weights; the gradients are those of the sum of all losses.
"""

import gc
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

import comm_collectives as cc
from comm_collectives.base.streams.sockets import SocketStreams
from comm_collectives.call.groups.groups import GroupState, group_state
from comm_collectives.call.signature.callsite import call_site
from comm_collectives.collectives.broadcasting import broadcast
from comm_collectives.collectives.gathers import all_gather, reduce_scatter
from comm_collectives.collectives.rooted import gather, scatter
from comm_collectives.errors import LostGradientWarning, MismatchError
from ranktest import run_ranks
from ranktest.memory import resident_bytes

# A rank that takes part with zeros loses the gradients that the others have for it; see the test.
pytestmark = pytest.mark.filterwarnings("ignore::comm_collectives.errors.LostGradientWarning")

Tensors = list[torch.Tensor]
_LIMIT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A collective: what it gives each rank, in one process and among ranks."""

    name: str
    rows: Callable[[int, int], int]  # of the input of a rank, in a group of a size
    oracle: Callable[[Tensors], list[Tensors]]
    call: Callable[[torch.Tensor], Tensors]


def _splits(rank: int, size: int) -> list[int]:
    """Rows from one rank to each; rank 1 sends nothing to rank 0."""
    return [(3 * rank + dst + 2) % 4 * (not (rank == 1 and dst == 0)) for dst in range(size)]


def _all_to_all(xs: Tensors) -> list[Tensors]:
    pieces = [x.split(_splits(src, len(xs))) for src, x in enumerate(xs)]
    return [[torch.cat([piece[dst] for piece in pieces])] for dst in range(len(xs))]


def _kept(size: int) -> list[int]:
    return [2, 0, 3][:size]


def _reduced(op: str, xs: Tensors) -> torch.Tensor:
    stacked = torch.stack(xs)
    if op == "avg":
        return stacked.mean(0)
    return {"sum": torch.sum, "min": torch.amin, "max": torch.amax, "product": torch.prod}[op](
        stacked, 0
    )


def _halves(x: torch.Tensor, size: int) -> Tensors:
    """One tensor for each rank, of different rows."""
    return list(x.split([x.shape[0] - size + 1, *[1] * (size - 1)]))


def _scatter(x: torch.Tensor) -> Tensors:
    tensors = _halves(x, dist.get_world_size()) if dist.get_rank() == 1 else None
    return [scatter(tensors, src=1)]


def _reduction(op: str, columns: str) -> list[Case]:
    return [
        Case(
            name=f"all_reduce {op} {columns}",
            rows=lambda rank, size: 4 if columns == "few" else 300,
            oracle=lambda xs: [[_reduced(op, xs)] for _ in xs],
            call=lambda x: [cc.all_reduce(x, op=op)],
        ),
        Case(
            name=f"reduce_scatter {op} {columns}",
            rows=lambda rank, size: sum(_kept(size)) * (1 if columns == "few" else 99),
            oracle=lambda xs: [
                [piece]
                for piece in _reduced(op, xs).split(
                    [n * (1 if columns == "few" else 99) for n in _kept(len(xs))]
                )
            ],
            call=lambda x: [
                reduce_scatter(
                    x,
                    op=op,
                    splits=[
                        n * (1 if columns == "few" else 99) for n in _kept(dist.get_world_size())
                    ],
                )
            ],
        ),
    ]


_CASES = [
    Case(
        name="all_to_all",
        rows=lambda rank, size: sum(_splits(rank, size)),
        oracle=_all_to_all,
        call=lambda x: [
            cc.all_to_all(x, input_splits=_splits(dist.get_rank(), dist.get_world_size()))
        ],
    ),
    Case(
        name="all_gather few",
        rows=lambda rank, size: 2 * rank,
        oracle=lambda xs: [[torch.cat(xs)] for _ in xs],
        call=lambda x: [all_gather(x)],
    ),
    Case(
        name="all_gather many",
        rows=lambda rank, size: 200 * (size - 1 - rank),
        oracle=lambda xs: [[torch.cat(xs)] for _ in xs],
        call=lambda x: [all_gather(x)],
    ),
    Case(
        name="broadcast",
        rows=lambda rank, size: 5 + rank,
        oracle=lambda xs: [[xs[1] * 1] for _ in xs],
        call=lambda x: [broadcast(x if dist.get_rank() == 1 else None, src=1)],
    ),
    Case(
        name="broadcast many",
        rows=lambda rank, size: 300,
        oracle=lambda xs: [[xs[0] * 1] for _ in xs],
        call=lambda x: [broadcast(x, src=0)],
    ),
    Case(
        name="gather",
        rows=lambda rank, size: 3 * rank + 1,
        oracle=lambda xs: [[], xs, []][: len(xs)],
        call=lambda x: gather(x, dst=1) or [],
    ),
    Case(
        name="scatter",
        rows=lambda rank, size: 9,
        oracle=lambda xs: [[piece] for piece in _halves(xs[1], len(xs))],
        call=_scatter,
    ),
    *[case for op in ("sum", "avg", "min", "max", "product") for case in _reduction(op, "few")],
    *[case for op in ("sum", "max", "product") for case in _reduction(op, "many")],
]


def _inputs(case: Case, size: int) -> Tensors:
    """[rows, 2] small numbers in float64: ties between ranks, and zeros."""
    xs = []
    for rank in range(size):
        generator = torch.Generator().manual_seed(7 * rank)
        rows = case.rows(rank, size)
        x = torch.randint(-3, 4, (rows, 2), generator=generator).double() / 2
        xs.append(x.requires_grad_())
    return xs


def _loss(outputs: Tensors, rank: int) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for i, y in enumerate(outputs):
        generator = torch.Generator().manual_seed(100 * rank + i)
        total = total + (y * torch.randn(y.shape, generator=generator).double()).sum()
    return total


def _gradients(case: Case, size: int, users: set[int]) -> Tensors:
    """The oracle: gradients of all inputs, of the losses of those who use their output."""
    xs = _inputs(case, size)
    outputs = case.oracle(xs)
    loss = sum((_loss(outputs[r], r) for r in users), torch.zeros((), dtype=torch.float64))
    if not loss.requires_grad:
        return [torch.zeros_like(x) for x in xs]
    grads = torch.autograd.grad(loss, xs, allow_unused=True)
    return [
        torch.zeros_like(x) if grad is None else grad for x, grad in zip(xs, grads, strict=True)
    ]


def _check(x: torch.Tensor, want: torch.Tensor, name: str) -> None:
    got = torch.zeros_like(x) if x.grad is None else x.grad
    assert torch.allclose(got, want, rtol=1e-12, atol=1e-12), (name, got, want)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradients_are_those_of_one_process(world_size: int) -> None:
    def fn(rank: int, world_size: int) -> None:
        for case in _CASES:
            if world_size == 1 and case.name in ("broadcast", "gather", "scatter"):
                continue  # their root is rank 1
            xs = _inputs(case, world_size)
            outputs = case.call(xs[rank])
            for y, want in zip(outputs, case.oracle(xs)[rank], strict=False):
                assert torch.equal(y, want), case.name
            _loss(outputs, rank).backward()
            _check(xs[rank], _gradients(case, world_size, set(range(world_size)))[rank], case.name)

    run_ranks(fn, world_size)


def test_rank_that_needs_no_gradient_takes_part() -> None:
    """In the backward, and with its numbers in what the others' gradients depend on."""

    def fn(rank: int, world_size: int) -> None:
        for case in _CASES:
            x = _inputs(case, world_size)[rank]
            if rank == 0:
                x = x.detach()
            loss = _loss(case.call(x), rank)
            assert loss.requires_grad or case.name in ("broadcast many",), case.name
            if loss.requires_grad:
                loss.backward()
            if rank:
                _check(x, _gradients(case, world_size, {0, 1, 2})[rank], case.name)

    run_ranks(fn, 3)


def _use(case: Case, rank: int, size: int) -> tuple[torch.Tensor, Tensors]:
    x = _inputs(case, size)[rank]
    return x, case.call(x)


@pytest.mark.parametrize("meets", ["on one host", "across hosts"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_rank_that_drops_its_graph_and_goes_on_takes_part_with_zeros(
    world_size: int, meets: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GroupState, "may_share_memory", meets == "on one host")

    def fn(rank: int, world_size: int) -> None:
        for case in _CASES:
            x, outputs = _use(case, rank, world_size)
            if rank != 1:
                _loss(outputs, rank).backward()
                _check(x, _gradients(case, world_size, {0, 2} - {world_size})[rank], case.name)
            del outputs
            total = cc.all_reduce(torch.ones(1), timeout_s=_LIMIT_S)
            assert total.item() == world_size, case.name
        apart = isinstance(group_state(None).frames.streams, SocketStreams)
        assert apart == (meets == "across hosts")

    run_ranks(fn, world_size)


@pytest.mark.parametrize("meets", ["on one host", "across hosts"])
def test_rank_that_keeps_its_graph_and_goes_on_is_an_error_everywhere(
    meets: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GroupState, "may_share_memory", meets == "on one host")

    def fn(rank: int, world_size: int) -> None:
        for case in _CASES if meets == "on one host" else _CASES[::4]:
            x, outputs = _use(case, rank, world_size)
            with pytest.raises(MismatchError, match=r"rank 1: .*call \d+ still has its graph here"):
                if rank == 1:
                    cc.all_reduce(torch.ones(1), timeout_s=_LIMIT_S)
                else:
                    _loss(outputs, rank).backward()
            assert x.grad is None, case.name
            assert cc.all_reduce(torch.ones(1), timeout_s=_LIMIT_S).item() == world_size

    run_ranks(fn, 3)


def _raise(grad: torch.Tensor) -> torch.Tensor:
    raise ValueError("no memory for this gradient")


def _two_calls(rank: int, bad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The input, and the loss of two calls with a backward between them that raises on one."""
    x = torch.ones(3, 4, requires_grad=True)
    y = cc.all_to_all(x, input_splits=[1, 1, 1]) * 2
    if rank == bad:
        y.register_hook(_raise)
    return x, cc.all_to_all(y, input_splits=[1, 1, 1]).sum()


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("name", ["backward", "grad", "dispatch and combine"])
def test_backward_that_raises_ahead_of_every_call_is_an_error_on_all(
    name: str, keeps: bool
) -> None:
    """As one that has no memory for the head; the program may have dropped its loss."""

    def fn(rank: int, world_size: int) -> None:
        x = torch.ones(4, 8, requires_grad=True)
        if name == "dispatch and combine":
            choices, weights = torch.tensor([[0, 1]] * 4), torch.full((4, 2), 0.5)
            d = cc.dispatch(x, choices, weights, num_experts=2, group=dist.group.WORLD)
            y = cc.combine(d.x * d.topk_weights[:, None], d.handle)
            del d
        else:
            y = cc.all_reduce(x)
        head = y * 1.0
        if rank == 1:
            head.register_hook(_raise)
        loss, kept = head.sum(), [head] if keeps else []
        del head, y
        with pytest.raises(ValueError if rank == 1 else MismatchError) as caught:
            _ = torch.autograd.grad(loss, x) if name == "grad" else loss.backward()
        del loss
        assert rank == 1 or "a backward pass here ended in an exception" in str(caught.value)
        time.sleep(2.0 if rank == 1 else 0.0)
        assert cc.all_reduce(torch.ones(1)).item() == world_size
        del kept

    run_ranks(fn, 2, timeout_s=60)


def test_backward_that_raises_elsewhere_is_none_of_ours() -> None:
    def fn(rank: int, world_size: int) -> None:
        x = torch.ones(2, requires_grad=True)
        y = cc.all_reduce(x)
        other = torch.ones(1, requires_grad=True) * 2
        other.register_hook(_raise)
        with pytest.raises(ValueError, match="no memory"):
            other.backward()
        time.sleep(1.5 * rank)
        y.sum().backward()
        assert x.grad is not None and x.grad.tolist() == [2.0, 2.0]

    run_ranks(fn, 2, timeout_s=60)


@pytest.mark.parametrize("meets", ["on one host", "across hosts"])
@pytest.mark.parametrize("then", ["goes on", "waits elsewhere", "keeps the loss and waits"])
def test_backward_that_raises_on_one_rank_is_an_error_on_all(
    then: str, meets: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GroupState, "may_share_memory", meets == "on one host")

    def fn(rank: int, world_size: int) -> float:
        other = dist.new_group()
        assert cc.all_reduce(torch.ones(1)).item() == world_size
        x, loss = _two_calls(rank, 1)
        dist.barrier(other)
        started = time.monotonic()
        with pytest.raises(ValueError if rank == 1 else MismatchError) as caught:
            loss.backward()
        took_s = time.monotonic() - started
        assert x.grad is None
        assert rank == 1 or "rank 1: " in str(caught.value)
        assert rank == 1 or "ended in an exception ahead of call 2" in str(caught.value)
        if then != "keeps the loss and waits":
            del loss, caught
        if then != "goes on":
            dist.barrier(other)
        # The program of every rank had one error, so all are at the same point again.
        x, loss = _two_calls(rank, -1)
        loss.backward()
        assert x.grad is not None
        assert x.grad.tolist() == [[2.0] * 4] * 3
        return took_s

    times = run_ranks(fn, 3)
    assert max(times) < 10  # a limit of the group would be far longer


def test_two_graphs_in_another_order_are_an_error_everywhere() -> None:
    def fn(rank: int, world_size: int) -> None:
        xs = [torch.ones(2, requires_grad=True) for _ in range(2)]
        losses = [cc.all_reduce(x).sum() for x in xs]
        with pytest.raises(MismatchError, match=r"rank 0: .*call 2 still .* rank 1: .*call 1 sti"):
            for loss in losses if rank == 0 else losses[::-1]:
                loss.backward()
        assert [x.grad for x in xs] == [None, None]

    run_ranks(fn, 2)


def test_rank_that_drops_one_graph_and_runs_another_takes_part() -> None:
    def fn(rank: int, world_size: int) -> list[float | None]:
        xs = [torch.ones(2, requires_grad=True) for _ in range(3)]
        losses = [cc.all_reduce(x).sum() for x in xs]
        if rank == 1:
            del losses[2], losses[0]
        for loss in reversed(losses):
            loss.backward()
        assert cc.all_reduce(torch.ones(1), timeout_s=_LIMIT_S).item() == 2
        return [None if x.grad is None else x.grad[0].item() for x in xs]

    assert run_ranks(fn, 2) == [[1.0, 2.0, 1.0], [None, 2.0, None]]


def test_rank_that_runs_a_part_of_a_graph_and_drops_the_rest_is_an_error_everywhere() -> None:
    def fn(rank: int, world_size: int) -> None:
        x = torch.ones(2, requires_grad=True)
        middle = cc.all_reduce(x) * 2
        loss = cc.all_reduce(middle).sum()
        with pytest.raises(MismatchError, match="a part of the graph of call 1 ran here"):
            if rank == 0:
                loss.backward()
            else:
                torch.autograd.grad(loss, middle)
                del loss, middle
                cc.all_reduce(torch.ones(1), timeout_s=_LIMIT_S)
        assert x.grad is None

    run_ranks(fn, 2)


@pytest.mark.parametrize("meets", ["on one host", "across hosts"])
def test_rank_that_does_nothing_more_takes_part_with_zeros(
    meets: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GroupState, "may_share_memory", meets == "on one host")

    def fn(rank: int, world_size: int) -> None:
        other = dist.new_group()
        for case in _CASES if meets == "on one host" else _CASES[::8]:
            x, outputs = _use(case, rank, world_size)
            if rank == 0:
                _loss(outputs, rank).backward()
                _check(x, _gradients(case, world_size, {0})[rank], case.name)
            del outputs
            dist.barrier(other)  # which the package knows nothing of

    run_ranks(fn, 3)


def test_rank_without_gradients_at_the_moment_takes_part_with_zeros() -> None:
    def fn(rank: int, world_size: int) -> None:
        for case in _CASES:
            if case.name in ("broadcast", "scatter"):
                continue  # rank 1 gives all
            with torch.set_grad_enabled(rank != 1):
                x, outputs = _use(case, rank, world_size)
            assert rank != 1 or not any(y.requires_grad for y in outputs)
            if rank != 1:
                _loss(outputs, rank).backward()
                _check(x, _gradients(case, world_size, {0, 2})[rank], case.name)
            assert cc.all_reduce(torch.ones(1), timeout_s=_LIMIT_S).item() == world_size

    run_ranks(fn, 3)


def test_gradients_that_are_lost_are_warned_of_where_they_are_lost() -> None:
    def fn(rank: int, world_size: int) -> None:
        x = torch.ones(2, requires_grad=True)
        y = cc.all_reduce(x if rank < 2 else x.detach())
        if rank == 0:
            y.sum().backward()
        del y
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            cc.all_reduce(torch.ones(1), timeout_s=_LIMIT_S)
        texts = [str(w.message) for w in seen if w.category is LostGradientWarning]
        assert len(texts) == (rank == 1)  # rank 2 needs no gradient, so it loses none
        if texts:
            assert "rank 1: all_reduce call 1 made at autograd/test_backward_node.py:" in texts[0]

    run_ranks(fn, 3)


def test_rank_that_loses_a_gradient_is_warned() -> None:
    """What rank 0 makes of the input of rank 1 is lost, unless that takes part by itself."""

    def fn(rank: int, world_size: int) -> None:
        x = torch.ones(2, requires_grad=True)
        y = all_gather(x)
        if rank == 0:
            y.sum().backward()
            cc.all_reduce(torch.ones(1), timeout_s=_LIMIT_S)
        else:
            del y
            with pytest.warns(
                LostGradientWarning, match=r"rank 1: all_gather call 1 made at .*lost"
            ):
                cc.all_reduce(torch.ones(1), timeout_s=_LIMIT_S)
            assert x.grad is None

    def call_site_free(rank: int, world_size: int) -> None:
        with call_site("the test"):
            fn(rank, world_size)

    run_ranks(call_site_free, 2)


def test_several_owed_backwards_are_served_in_the_order_of_the_peers() -> None:
    def fn(rank: int, world_size: int) -> None:
        x = torch.ones(2, requires_grad=True)
        outputs = [cc.all_reduce(x * i) for i in range(1, 80)]  # one after the other, 79 of them
        if rank == 0:
            sum(y.sum() for y in outputs).backward()
            assert x.grad is not None
            assert x.grad.tolist() == [sum(range(1, 80))] * 2
        del outputs
        assert cc.all_reduce(torch.ones(1), timeout_s=_LIMIT_S).item() == 2
        assert len(group_state(None).pending) == 0

    run_ranks(fn, 2)


def test_second_backward_that_one_rank_leaves_out_is_a_mismatch() -> None:
    def fn(rank: int, world_size: int) -> None:
        x = torch.ones(2, requires_grad=True)
        y = cc.all_reduce(x)
        y.sum().backward(retain_graph=True)
        y.sum().backward(retain_graph=True)
        assert x.grad is not None
        assert x.grad.tolist() == [4, 4]
        with pytest.raises(MismatchError, match="operation differs"):
            _ = y.sum().backward() if rank == 0 else cc.all_reduce(torch.ones(1))

    run_ranks(fn, 2, timeout_s=_LIMIT_S)


def test_graph_through_several_collectives_and_back_on_uneven_programs() -> None:
    """Rank 1 uses only the last of three outputs, and only half of the time."""

    def fn(rank: int, world_size: int) -> None:
        for step in range(6):
            w = torch.full((3, 3), 0.5 + rank, dtype=torch.float64, requires_grad=True)
            h = all_gather(torch.ones(1, 3, dtype=torch.float64) @ w)
            r = reduce_scatter(h * 2)
            b = broadcast(r, src=0)
            if rank == 0:
                (h.sum() + r.sum() + b.sum()).backward()
            elif step % 2:
                b.sum().backward()
            assert rank == 1 or w.grad is not None
            del h, r, b
        assert cc.all_reduce(torch.ones(1), timeout_s=_LIMIT_S).item() == 2

    run_ranks(fn, 2)


def test_nan_gets_the_gradient_that_torch_gives_it() -> None:
    values = [[1.0, float("nan"), 2.0], [3.0, 1.0, 2.0]]
    stacked = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    stacked.amax(0).sum().backward()

    def fn(rank: int, world_size: int) -> None:
        for repeat in (1, 100):
            x = torch.tensor(values[rank] * repeat, dtype=torch.float64, requires_grad=True)
            y = cc.all_reduce(x, op="max")
            assert torch.isnan(y[1::3]).all()
            (y.sum() / 2).backward()  # both ranks have this loss
            assert stacked.grad is not None
            want = stacked.grad[rank].repeat(repeat)
            assert torch.allclose(x.grad, want, equal_nan=True)

    run_ranks(fn, 2)


def test_complex_gradients_are_torchs() -> None:
    values = [[1 + 2j, 0j, 3j], [2 - 1j, 1j, 0j]]
    stacked = torch.tensor(values, dtype=torch.complex128, requires_grad=True)
    stacked.prod(0).abs().square().sum().backward()

    def fn(rank: int, world_size: int) -> None:
        for repeat in (1, 100):
            x = torch.tensor(values[rank] * repeat, dtype=torch.complex128, requires_grad=True)
            (cc.all_reduce(x, op="product").abs().square().sum() / 2).backward()
            assert stacked.grad is not None
            assert torch.allclose(x.grad, stacked.grad[rank].repeat(repeat))

    run_ranks(fn, 2)


def test_graphs_that_were_dropped_keep_no_data_of_their_calls() -> None:
    """As those of an evaluation that forgot no_grad."""

    def fn(rank: int, world_size: int) -> int:
        x = torch.ones(1 << 18, requires_grad=True)
        cc.all_reduce(x, op="max")
        before = resident_bytes()
        for _ in range(200):  # whose backward needs what was the largest, where it runs
            cc.all_reduce(x, op="max")
        gc.collect()
        return resident_bytes() - before

    assert max(run_ranks(fn, 2)) < 60 * (1 << 20)
