"""dispatch and combine against a dense MoE layer in one process, forward and backward."""

import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import comm_collectives as cc
from comm_collectives.moe import Dispatched
from comm_collectives.moe.options import MoeOptions
from ranktest import collect_ranks, run_ranks

_E, _D = 8, 6  # experts, hidden size


def _experts(hidden: int = _D) -> Tensor:
    generator = torch.Generator().manual_seed(99)
    return torch.randn(_E, hidden, hidden, generator=generator, dtype=torch.float64)


def _dense_moe(x: Tensor, topk_idx: Tensor, topk_weights: Tensor, experts: Tensor) -> Tensor:
    """out[t] = sum over k of weight[t, k] * tanh(x[t] @ experts[idx[t, k]]); no code of ours."""
    y = torch.tanh(torch.einsum("td,edf->tef", x, experts))
    chosen = y.gather(1, topk_idx.clamp(min=0)[:, :, None].expand(-1, -1, y.shape[2]))
    return (chosen * (topk_weights * (topk_idx >= 0))[:, :, None]).sum(1)


def _sparse_moe(dispatched: Dispatched, experts: Tensor) -> Tensor:
    """The same on sorted rows; an expert without rows is skipped, and no row leaves no graph."""
    x, weights = dispatched.x, dispatched.topk_weights
    rows, start = [x.new_zeros(0, x.shape[1]).detach()], 0
    for e, count in enumerate(dispatched.num_tokens_per_expert):
        if count:
            piece = slice(start, start + count)
            rows.append(torch.tanh(x[piece] @ experts[e]) * weights[piece, None])
        start += count
    return torch.cat(rows)


def _layer(
    inputs: tuple[Tensor, Tensor, Tensor],
    experts: Tensor,
    grad: Tensor,
    group: dist.ProcessGroup | None,
    alignment: int,
    options: MoeOptions,
) -> tuple[Tensor, ...]:
    x, idx, weights = (t.clone() for t in inputs)
    experts = experts.clone().requires_grad_()
    x.requires_grad_()
    weights.requires_grad_()
    sent = cc.dispatch(
        x, idx, weights, num_experts=_E, group=group, expert_alignment=alignment, options=options
    )
    out = cc.combine(_sparse_moe(sent, experts), sent.handle)
    out.backward(grad)
    assert x.grad is not None
    assert weights.grad is not None
    expert_grad = torch.zeros_like(experts) if experts.grad is None else experts.grad
    return out.detach(), x.grad, weights.grad, expert_grad


def _routing(kind: str, tokens: int, choices: int, generator: torch.Generator) -> Tensor:
    if kind == "one expert":
        return torch.full((tokens, choices), 5)
    if kind == "same expert twice":
        return torch.randint(0, _E, (tokens, 1), generator=generator).expand(tokens, choices)
    if kind == "two experts":
        return 7 * torch.randint(0, 2, (tokens, choices), generator=generator)
    if kind == "some of no expert":
        return torch.randint(-1, _E, (tokens, choices), generator=generator)
    if kind == "all of no expert":
        return torch.full((tokens, choices), -1)
    return torch.rand(tokens, _E, generator=generator).topk(choices, dim=1).indices


def _job(
    kind: str, i: int, world_size: int, generator: torch.Generator
) -> tuple[int, list[tuple[Tensor, Tensor, Tensor]], list[Tensor]]:
    """Alignment, inputs of each rank, gradients of each rank's output."""
    choices, alignment = 1 + i % 3, 1 + 3 * (i % 2)
    counts = torch.randint(0, 9, (world_size,), generator=generator).tolist()
    counts[i % world_size] = 0
    if kind == "no token":
        counts = [0] * world_size
    if kind == "no choice":
        choices = 0
    inputs = [
        (
            torch.randn(n, _D, generator=generator, dtype=torch.float64),
            _routing(kind, n, choices, generator),
            torch.rand(n, choices, generator=generator, dtype=torch.float64),
        )
        for n in counts
    ]
    grads = [torch.randn(n, _D, generator=generator, dtype=torch.float64) for n in counts]
    return alignment, inputs, grads


_KINDS = (
    *("random", "one expert", "same expert twice", "two experts", "some of no expert"),
    *("random", "no token", "all of no expert", "no choice", "random"),
)


@pytest.mark.parametrize(
    ("world_size", "route", "per_node"),
    [
        *((1, "flat", None), (2, "flat", None), (4, "flat", None)),
        *((1, "dedup", None), (2, "dedup", None), (4, "dedup", None)),
        *((1, "hierarchical", 1), (2, "hierarchical", 1), (2, "hierarchical", 2)),
        *((4, "hierarchical", 1), (4, "hierarchical", 2), (4, "hierarchical", 4)),
    ],
)
def test_outputs_and_gradients_equal_a_dense_layer(
    world_size: int, route: Any, per_node: int | None
) -> None:
    seed = random.randrange(10**9)
    generator = torch.Generator().manual_seed(seed)
    jobs = [_job(kind, i, world_size, generator) for i, kind in enumerate(_KINDS)]
    options = MoeOptions(route=route, ranks_per_node=per_node, timeout_s=30)

    def fn(rank: int, world_size: int) -> list[tuple[Tensor, ...]]:
        share = slice(rank * _E // world_size, (rank + 1) * _E // world_size)
        return [
            _layer(inputs[rank], _experts()[share], grads[rank], dist.group.WORLD, align, options)
            for align, inputs, grads in jobs
        ]

    by_rank = run_ranks(fn, world_size)
    for i, (alignment, inputs, grads) in enumerate(jobs):
        got = [torch.cat([results[i][part] for results in by_rank]) for part in range(4)]
        x, idx, weights = (torch.cat(parts) for parts in zip(*inputs, strict=True))
        local = _layer((x, idx, weights), _experts(), torch.cat(grads), None, alignment, options)
        leaves = [t.requires_grad_() for t in (x.clone(), weights.clone(), _experts())]
        out = _dense_moe(leaves[0], idx, leaves[1], leaves[2])
        out.backward(torch.cat(grads))
        for part, want in enumerate([out.detach(), *(leaf.grad for leaf in leaves)]):
            if want is None:  # torch gives no gradient to what a product with nothing used
                want = torch.zeros_like(leaves[part - 1])
            for result in (got[part], local[part]):
                torch.testing.assert_close(
                    result, want, rtol=0, atol=1e-12, msg=f"seed {seed} {_KINDS[i]} {part}"
                )
        if route == "flat":
            assert torch.equal(got[0], local[0]), f"not bitwise equal: seed {seed} {_KINDS[i]}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_rank_and_four_agree_bit_for_bit(dtype: torch.dtype) -> None:
    seed = random.randrange(10**9)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(64, 40, generator=generator).to(dtype)
    idx = torch.rand(64, _E, generator=generator).topk(6, dim=1).indices
    weights = torch.rand(64, 6, generator=generator)  # float32 beside rows of 16 bits

    def run(part: slice, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
        mine = x[part].clone().requires_grad_()
        sent = cc.dispatch(mine, idx[part], weights[part], num_experts=_E, group=group)
        out = cc.combine((sent.x * sent.topk_weights[:, None]).to(dtype), sent.handle)
        out.square().sum().backward()
        assert mine.grad is not None
        return out.detach(), mine.grad

    def fn(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
        return run(slice(16 * rank, 16 * rank + 16), dist.group.WORLD)

    by_rank = run_ranks(fn, 4)
    for got, want in zip(zip(*by_rank, strict=True), run(slice(0, 64), None), strict=True):
        assert torch.equal(torch.cat(got), want), f"seed {seed}"


def test_rows_are_sorted_by_expert_then_source_then_row() -> None:
    def fn(rank: int, world_size: int) -> tuple[object, ...]:
        # The row says where it comes from: rank, token.
        x = torch.tensor([[rank, t] for t in range(3)], dtype=torch.float32)
        idx = torch.tensor([[3, 0], [0, 2], [2, 3]])
        weights = torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]]) + rank
        sent = cc.dispatch(
            x, idx, weights, num_experts=4, group=dist.group.WORLD, expert_alignment=3
        )
        return sent.x.tolist(), sent.topk_weights.tolist(), sent.num_tokens_per_expert

    first, second = run_ranks(fn, 2)
    rows, weights, counts = first  # experts 0 and 1
    assert counts == (6, 0)
    assert rows == [[0, 0], [0, 1], [1, 0], [1, 1], [0, 0], [0, 0]]
    assert weights == pytest.approx([0.2, 0.3, 1.2, 1.3, 0, 0])
    rows, weights, counts = second  # experts 2 and 3
    assert counts == (6, 6)
    assert rows[:6] == [[0, 1], [0, 2], [1, 1], [1, 2], [0, 0], [0, 0]]
    assert weights[6:] == pytest.approx([0.1, 0.6, 1.1, 1.6, 0, 0])


def test_odd_hidden_size_leaves_room_for_the_weights() -> None:
    """Rows of 3 x bfloat16 are 6 bytes, which a float64 weight does not divide."""

    def fn(rank: int, world_size: int) -> None:
        x = torch.arange(15.0).view(5, 3).bfloat16().requires_grad_()
        idx = torch.tensor([[0, 1]] * 5)
        weights = torch.full((5, 2), 0.5, dtype=torch.float64).requires_grad_()
        sent = cc.dispatch(x, idx, weights, num_experts=2, group=dist.group.WORLD)
        y = sent.x * sent.topk_weights[:, None].bfloat16()
        out = cc.combine(y, sent.handle)
        assert torch.equal(out, x)
        out.sum().backward()
        assert x.grad is not None
        assert weights.grad is not None
        assert torch.equal(x.grad, torch.ones_like(x))
        assert torch.equal(weights.grad, x.double().sum(1, keepdim=True).expand(5, 2))

    run_ranks(fn, 2)


def test_rank_without_rows_that_ignores_them_still_takes_part_in_backward() -> None:
    """Rank 1 holds an expert that nobody chose and returns fresh zeros, outside any graph."""

    def fn(rank: int, world_size: int) -> list[list[float]]:
        x = torch.ones(2, 3, requires_grad=True)
        weights = torch.ones(2, 1, requires_grad=True)
        idx = torch.zeros(2, 1, dtype=torch.int64)
        sent = cc.dispatch(
            x, idx, weights, num_experts=2, group=dist.group.WORLD, options=MoeOptions(timeout_s=10)
        )
        y = sent.x * 2 if rank == 0 else torch.zeros(0, 3)
        cc.combine(y, sent.handle).sum().backward()
        assert x.grad is not None
        return x.grad.tolist()

    assert run_ranks(fn, 2) == [[[2.0] * 3] * 2] * 2


def test_gradients_wanted_on_one_rank_only_do_not_deadlock() -> None:
    def fn(rank: int, world_size: int) -> object:
        x = torch.ones(2 * rank, 3, requires_grad=rank == 1)  # rank 0 has no tokens
        sent = cc.dispatch(
            x,
            torch.zeros(2 * rank, 1, dtype=torch.int64),
            torch.ones(2 * rank, 1),
            num_experts=2,
            group=dist.group.WORLD,
            options=MoeOptions(timeout_s=10),
        )
        cc.combine(sent.x * 3, sent.handle).sum().backward()
        return None if x.grad is None else x.grad.tolist()

    assert run_ranks(fn, 2) == [None, [[3.0] * 3] * 2]


def _unused_on_rank_1(route: Any, then: str, idx: Tensor, limit_s: float) -> Any:
    """A step whose output rank 1's loss does not use, though rank 0's does."""

    def fn(rank: int, world_size: int) -> object:
        per_node = 1 if route == "hierarchical" else None
        x = torch.ones(2, 3, requires_grad=True)
        scale = torch.full((), 2.0 + rank, requires_grad=True)
        sent = cc.dispatch(
            *(x, idx, torch.ones(2, 2)),
            num_experts=2,
            group=dist.group.WORLD,
            options=MoeOptions(route=route, ranks_per_node=per_node, timeout_s=limit_s),
        )
        out = cc.combine(sent.x * scale, sent.handle)
        if rank == 0:
            out.sum().backward()
        elif then != "keeps the output":
            del out, sent
            time.sleep(4 if then == "drops the output and computes" else 0)
        total = cc.all_reduce(torch.ones(1), timeout_s=limit_s).item()
        return total, [None if t.grad is None else t.grad.tolist() for t in (x, scale)]

    return fn


@pytest.mark.parametrize("route", ["flat", "dedup", "hierarchical"])
def test_rank_without_rows_may_drop_the_output_unused(route: Any) -> None:
    fn = _unused_on_rank_1(route, "drops the output", torch.zeros(2, 2, dtype=torch.int64), 10)
    # Both choices of rank 0's two tokens of three elements: 12 times rank 0's expert.
    assert run_ranks(fn, 2) == [(2.0, [[[4.0] * 3] * 2, 12.0]), (2.0, [None, None])]


def test_rank_that_keeps_the_output_unused_is_an_error_on_every_rank() -> None:
    fn = _unused_on_rank_1("flat", "keeps the output", torch.tensor([[0, 1], [1, 0]]), 10)
    for outcome in collect_ranks(fn, 2, timeout_s=30):
        assert outcome.error_type == "MismatchError", outcome.error
        assert "call 2 still has its graph here" in str(outcome.error)


@pytest.mark.parametrize("then", ["drops the output", "drops the output and computes"])
def test_rank_with_rows_that_leaves_the_output_unused_is_no_silent_loss(then: str) -> None:
    fn = _unused_on_rank_1("flat", then, torch.tensor([[0, 1], [1, 0]]), 10)
    for outcome in collect_ranks(fn, 2, timeout_s=30):
        # Nobody waits: the backward ends on both ranks, and the next call on both in this error.
        assert outcome.error_type == "RefusedError", outcome.error
        assert "refused: rank 1: combine call 2 made at moe/test_dispatch_combine.py" in str(
            outcome.error
        )
        assert "gradients for its input, which are lost" in str(outcome.error)


def test_trained_experts_alone_get_gradients() -> None:
    """No input wants a gradient; the expert's parameter on rank 0 does."""

    def fn(rank: int, world_size: int) -> object:
        scale = torch.ones((), requires_grad=True)
        idx = torch.zeros(2, 1, dtype=torch.int64)
        sent = cc.dispatch(
            torch.ones(2, 3),
            idx,
            torch.ones(2, 1),
            num_experts=2,
            group=dist.group.WORLD,
            options=MoeOptions(timeout_s=10),
        )
        y = sent.x * scale if rank == 0 else torch.zeros(0, 3)
        cc.combine(y, sent.handle).sum().backward()
        return None if scale.grad is None else scale.grad.item()

    assert run_ranks(fn, 2) == [12.0, None]


def test_no_grad_keeps_no_graph() -> None:
    def fn(rank: int, world_size: int) -> None:
        x = torch.ones(2, 3, requires_grad=True)
        idx = torch.tensor([[0], [1]])
        with torch.no_grad():
            sent = cc.dispatch(x, idx, torch.ones(2, 1), num_experts=2, group=dist.group.WORLD)
            out = cc.combine(sent.x, sent.handle)
        assert not out.requires_grad
        assert torch.equal(out, x)

    run_ranks(fn, 2)


def test_without_a_group_no_process_group_is_needed() -> None:
    assert not dist.is_initialized()
    x = torch.randn(4, 3)
    sent = cc.dispatch(x, torch.tensor([[1], [0], [1], [0]]), torch.ones(4, 1), num_experts=3)
    assert sent.num_tokens_per_expert == (2, 2, 0)
    assert torch.equal(sent.x, x[[1, 3, 0, 2]])
    assert torch.equal(cc.combine(sent.x, sent.handle), x)


def test_strided_inputs_and_another_output_width() -> None:
    def fn(rank: int, world_size: int) -> None:
        frame = torch.randn(3, 8, dtype=torch.float64)
        x, idx = frame.t()[::2], torch.randint(0, 4, (2, 4)).t()
        weights = torch.rand(2, 4, dtype=torch.float64).t()
        sent = cc.dispatch(x, idx, weights, num_experts=4, group=dist.group.WORLD)
        y = (sent.x.repeat(1, 2) * sent.topk_weights[:, None]).t().contiguous().t()
        want = x.repeat(1, 2) * weights.sum(1, keepdim=True)
        torch.testing.assert_close(cc.combine(y, sent.handle), want)

    run_ranks(fn, 2)


def test_bad_choice_on_one_rank_ends_the_call_on_every_rank() -> None:
    def fn(rank: int, world_size: int) -> None:
        idx = torch.tensor([[0], [4 if rank == 1 else 1]])
        cc.dispatch(torch.ones(2, 3), idx, torch.ones(2, 1), num_experts=4, group=dist.group.WORLD)

    outcomes = collect_ranks(fn, 2, timeout_s=20)
    assert [o.error_type for o in outcomes] == ["RefusedError"] * 2
    for outcome in outcomes:
        assert "dispatch call 1 of group (0, 1) refused: rank 1: topk_idx holds 4 but" in str(
            outcome.error
        )
    assert max(o.elapsed_s for o in outcomes) < 10


def test_other_hidden_size_on_one_rank_ends_the_call_on_every_rank() -> None:
    def fn(rank: int, world_size: int) -> None:
        idx = torch.tensor([[0], [1]])
        cc.dispatch(
            torch.ones(2, 3 + rank), idx, torch.ones(2, 1), num_experts=4, group=dist.group.WORLD
        )

    outcomes = collect_ranks(fn, 2, timeout_s=20)
    assert [o.error_type for o in outcomes] == ["MismatchError"] * 2


_X, _IDX, _W = torch.ones(2, 3), torch.tensor([[0], [1]]), torch.ones(2, 1)


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "match"),
    [
        ((_X, _IDX - 2, _W), {}, ValueError, "topk_idx holds -2"),
        ((_X, _IDX.int(), _W), {}, TypeError, "convert to torch.int64"),
        ((_X.long(), _IDX, _W), {}, TypeError, "x is torch.int64"),
        ((_X, _IDX, _W.long()), {}, TypeError, "topk_weights torch.int64"),
        ((_X[0], _IDX, _W), {}, ValueError, r"x has shape \(3,\)"),
        ((_X[:, :0], _IDX, _W), {}, ValueError, "hidden > 0"),
        ((_X, _IDX[:1], _W), {}, ValueError, "with 2 tokens in x give"),
        ((_X, _IDX, _W.T), {}, ValueError, "make them equal"),
        ((_X, _IDX, _W), {"expert_alignment": 0}, ValueError, "must be at least 1"),
        ((_X, _IDX, _W), {"num_experts": 0}, ValueError, "must be at least 1"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    args: tuple[Tensor, Tensor, Tensor],
    kwargs: dict[str, int],
    error: type[Exception],
    match: str,
) -> None:
    with pytest.raises(error, match=match):
        cc.dispatch(*args, **{"num_experts": 4, **kwargs})


def test_experts_that_the_ranks_cannot_share_are_refused() -> None:
    def fn(rank: int, world_size: int) -> None:
        dist.barrier()
        with pytest.raises(ValueError, match="the group has 2 ranks but num_experts=3"):
            cc.dispatch(_X, _IDX, _W, num_experts=3, group=dist.group.WORLD)

    run_ranks(fn, 2)


def test_combine_wants_the_rows_of_its_dispatch() -> None:
    sent = cc.dispatch(_X, _IDX, _W, num_experts=2)
    with pytest.raises(ValueError, match="the dispatch gave 2 rows"):
        cc.combine(torch.ones(3, 3), sent.handle)
    with pytest.raises(TypeError, match=r"y is torch\.int64"):
        cc.combine(torch.ones(2, 3, dtype=torch.int64), sent.handle)
