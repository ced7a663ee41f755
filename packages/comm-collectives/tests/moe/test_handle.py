"""Dispatching the same choices again: with the earlier layout, and in activation recompute."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import comm_collectives as cc
from comm_collectives.moe.options import MoeOptions
from ranktest import collect_ranks, run_ranks

_E, _D = 4, 6
_ROUTES: list[dict[str, Any]] = [
    {"route": "flat"},
    {"route": "dedup"},
    {"route": "hierarchical", "ranks_per_node": 1},
]


@pytest.fixture(scope="module")
def loaded() -> None:
    """The first checkpoint imports torch's compiler: once here instead of in every rank."""
    checkpoint(lambda x: x * 2, torch.ones(1, requires_grad=True), use_reentrant=False)


def _inputs(rank: int, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    tokens = 0 if kind == "rank 1 has no token" and rank == 1 else 5
    x = torch.randn(tokens, _D, generator=generator, dtype=torch.float64)
    idx = torch.randint(-1, _E, (tokens, 3), generator=generator)
    if kind == "all to expert 0":
        idx = torch.zeros(tokens, 3, dtype=torch.int64)
    return x, idx, torch.rand(tokens, 3, generator=generator, dtype=torch.float64)


class _Experts(torch.nn.Module):
    """Saves tensors for its backward if, and only if, it has rows."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7 + rank)
        self.weight = torch.nn.Parameter(
            torch.randn(_D, _D, generator=generator, dtype=torch.float64)
        )

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        if x.shape[0] == 0:
            return torch.zeros(0, _D, dtype=x.dtype)
        return torch.tanh(x @ self.weight) * weights[:, None]


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("route", _ROUTES, ids=lambda r: str(r["route"]))
def test_recompute_gives_the_same_gradients(route: dict[str, Any], use_reentrant: bool) -> None:
    """Also where one rank's experts save nothing: its exchanges alone ask for a recompute."""

    def fn(rank: int, world_size: int) -> None:
        group = dist.group.WORLD
        for kind in ("random", "all to expert 0", "rank 1 has no token"):
            for reuses in (False, True):
                # A reentrant checkpoint refuses outputs outside any graph, such as fresh zeros.
                for covers in ("all",) if use_reentrant else ("dispatch and experts", "all"):
                    results = []
                    for recomputes in (False, True):
                        block = _Block(rank, kind, route, group, reuses=reuses)
                        results.append(block.gradients(covers, recomputes, use_reentrant))
                    for plain, again in zip(*results, strict=True):
                        assert torch.equal(plain, again), (kind, reuses, covers)

    run_ranks(fn, 2, timeout_s=50)


class _Block:
    """Dispatch, experts and combine, with part of it under checkpoint."""

    def __init__(
        self, rank: int, kind: str, route: dict[str, Any], group: Any, *, reuses: bool
    ) -> None:
        self.x, self.idx, self.weights = _inputs(rank, kind)
        self.experts, self.route, self.group = _Experts(rank), route, group
        self.reuses, self.handle = reuses, None

    def dispatched(self, x: Tensor, weights: Tensor) -> tuple[Tensor, Any]:
        reuse = self.handle if self.reuses else None
        sent = cc.dispatch(
            x,
            self.idx,
            weights,
            num_experts=_E,
            group=self.group,
            options=MoeOptions(**self.route, timeout_s=10, reuse=reuse),
        )
        self.handle = sent.handle
        return self.experts(sent.x, sent.topk_weights), sent.handle

    def gradients(self, covers: str, recomputes: bool, use_reentrant: bool) -> list[Tensor]:
        leaves = [self.x.clone().requires_grad_(), self.weights.clone().requires_grad_()]

        def whole(x: Tensor, weights: Tensor) -> Tensor:
            y, handle = self.dispatched(x * 2, weights * 2)
            return cc.combine(y, handle)

        def half(x: Tensor, weights: Tensor) -> Tensor:
            return self.dispatched(x * 2, weights * 2)[0]

        function = whole if covers == "all" else half
        if recomputes:
            out = checkpoint(function, *leaves, use_reentrant=use_reentrant)
        else:
            out = function(*leaves)
        if covers != "all":
            out = cc.combine(out, self.handle)
        (out * out).sum().backward()
        expert_grad = self.experts.weight.grad
        grads = [torch.zeros(1) if leaf.grad is None else leaf.grad for leaf in leaves]
        return [out.detach(), *grads, torch.zeros(1) if expert_grad is None else expert_grad]


def test_reuse_does_not_exchange_counts() -> None:
    """Every number that the counts decide is as before, though the peers are not asked."""

    def fn(rank: int, world_size: int) -> None:
        x, idx, weights = _inputs(rank, "random")
        group = dist.group.WORLD
        for route in _ROUTES:
            first = cc.dispatch(
                x, idx, weights, num_experts=_E, group=group, options=MoeOptions(**route)
            )
            again = cc.dispatch(
                2 * x,
                idx.clone(),
                weights,
                num_experts=_E,
                group=group,
                options=MoeOptions(**route, reuse=first.handle),
            )
            assert torch.equal(again.x, 2 * first.x)
            assert torch.equal(again.topk_weights, first.topk_weights)
            assert again.num_tokens_per_expert == first.num_tokens_per_expert
            assert again.handle.routing is first.handle.routing
            assert torch.equal(
                cc.combine(again.x, again.handle), 2 * cc.combine(first.x, first.handle)
            )

    run_ranks(fn, 2)


def test_reuse_within_one_rank() -> None:
    x, idx, weights = _inputs(0, "random")
    first = cc.dispatch(x, idx, weights, num_experts=_E)
    again = cc.dispatch(2 * x, idx, weights, num_experts=_E, options=MoeOptions(reuse=first.handle))
    assert torch.equal(again.x, 2 * first.x)


_OTHER: dict[str, tuple[Any, str]] = {
    "hidden size": (lambda x, i, w: {"x": x[:, :3]}, "hidden size=6, but here it is 3"),
    "dtype": (
        lambda x, i, w: {"x": x.float()},
        "dtype=float64, but here it is float32",
    ),
    "alignment": (lambda x, i, w: {"expert_alignment": 2}, "expert_alignment=1"),
    "num_experts": (lambda x, i, w: {"num_experts": 2 * _E}, "num_experts=4, but here it is 8"),
    "one choice": (lambda x, i, w: {"topk_idx": i.roll(1, 0)}, "other choices"),
    "one more of none": (
        lambda x, i, w: {"topk_idx": i.masked_fill(i == i.max(), -1)},
        "other choices",
    ),
    "no choice at all": (lambda x, i, w: {"topk_idx": i.masked_fill(i == -1, -2)}, "other choices"),
    "choices per token": (
        lambda x, i, w: {"topk_idx": i[:, :2], "topk_weights": w[:, :2]},
        "other choices",
    ),
}


@pytest.mark.parametrize("what", _OTHER)
def test_reuse_for_something_else_is_refused(what: str) -> None:
    x, idx, weights = _inputs(0, "random")
    first = cc.dispatch(x, idx, weights, num_experts=_E)
    change, text = _OTHER[what]
    given = {"x": x, "topk_idx": idx, "topk_weights": weights, "num_experts": _E}
    with pytest.raises(ValueError, match=text):
        cc.dispatch(**{**given, **change(x, idx, weights)}, options=MoeOptions(reuse=first.handle))


def test_reuse_of_other_choices_on_one_rank_ends_the_call_on_every_rank() -> None:
    def fn(rank: int, world_size: int) -> None:
        x, idx, weights = _inputs(rank, "random")
        group = dist.group.WORLD
        first = cc.dispatch(x, idx, weights, num_experts=_E, group=group)
        if rank == 1:
            idx = idx.roll(1, 0)
        options = MoeOptions(reuse=first.handle, timeout_s=10)
        cc.dispatch(x, idx, weights, num_experts=_E, group=group, options=options)

    outcomes = collect_ranks(fn, 2, timeout_s=20)
    assert [o.error_type for o in outcomes] == ["RefusedError"] * 2
    assert all(
        "rank 1: options.reuse is of a dispatch with other" in str(o.error) for o in outcomes
    )


def test_reuse_on_one_rank_alone_is_a_mismatch() -> None:
    def fn(rank: int, world_size: int) -> None:
        x, idx, weights = _inputs(rank, "random")
        group = dist.group.WORLD
        first = cc.dispatch(x, idx, weights, num_experts=_E, group=group)
        options = MoeOptions(reuse=first.handle if rank else None, timeout_s=10)
        cc.dispatch(x, idx, weights, num_experts=_E, group=group, options=options)

    outcomes = collect_ranks(fn, 2, timeout_s=20)
    assert [o.error_type for o in outcomes] == ["MismatchError"] * 2
    assert all("reused dispatch call differs" in str(o.error) for o in outcomes)


def test_reuse_of_different_dispatches_is_a_mismatch() -> None:
    """Rank 0 chose alike in both, and as many rows come to each rank: no size tells them apart."""

    def fn(rank: int, world_size: int) -> None:
        x, group = torch.ones(2, 3), dist.group.WORLD
        choices = [torch.tensor([[rank * i], [2]]) for i in range(2)]
        sent = [cc.dispatch(x, i, x[:, :1], num_experts=4, group=group) for i in choices]
        options = MoeOptions(reuse=sent[rank].handle, timeout_s=10)
        cc.dispatch(x, choices[1], x[:, :1], num_experts=4, group=group, options=options)

    outcomes = collect_ranks(fn, 2, timeout_s=20)
    assert [o.error_type for o in outcomes] == ["MismatchError"] * 2
    assert all("reused dispatch call differs" in str(o.error) for o in outcomes)
