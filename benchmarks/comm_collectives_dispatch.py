"""dispatch + combine against plain torch (index_select, all_to_all_single, index_add), in one run.

On one host, and across hosts: there each rank has shared memory of its own, all else is default.
Two gloo ranks, 1,024 tokens each, hidden size 256, 8 experts, top 2, fp32; the experts multiply by
the routing weight. Both sides exchange counts, rows and weights, are differentiable and give equal
results, which is checked first. Rounds alternate; every figure is the median over rounds of
our time / the other's time, with the quartiles. The floor is one bare all_to_all_single of the same
rows for each exchange of rows (2 in a forward, 4 with backward).

    python benchmarks/comm_collectives_dispatch.py
"""

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import comm_collectives as cc
from ranktest import leave_shared_memory, run_ranks

RANKS, TOKENS, HIDDEN, EXPERTS, CHOICES = 2, 1024, 256, 8, 2
ROUNDS, CALLS = 60, 3


class PlainAllToAll(torch.autograd.Function):
    """Rows by all_to_all_single, with the gradient going back the same way."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """Send `sent` rows to each rank."""
        ctx.splits = sent, received
        y = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(y, x.contiguous(), received, sent)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Send each row's gradient back."""
        sent, received = ctx.splits
        x = grad.new_empty(sum(sent), *grad.shape[1:])
        dist.all_to_all_single(x, grad.contiguous(), sent, received)
        return x, None, None


def plain_layer(x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """What one writes by hand with torch alone."""
    local = EXPERTS // RANKS
    flat = idx.reshape(-1)
    order = torch.argsort(flat, stable=True)
    token = order // CHOICES
    counts = torch.bincount(flat, minlength=EXPERTS)
    received_counts = torch.empty_like(counts)
    dist.all_to_all_single(received_counts, counts)
    sent = counts.view(RANKS, local).sum(1).tolist()
    received = received_counts.view(RANKS, local).sum(1).tolist()
    rows = PlainAllToAll.apply(x.index_select(0, token), sent, received)
    row_weights = PlainAllToAll.apply(weights.reshape(-1)[order], sent, received)
    expert = torch.arange(local).repeat(RANKS).repeat_interleave(received_counts)
    by_expert = torch.argsort(expert, stable=True)
    y = rows.index_select(0, by_expert) * row_weights.index_select(0, by_expert)[:, None]
    back = torch.empty_like(by_expert)
    back[by_expert] = torch.arange(by_expert.numel())
    returned = PlainAllToAll.apply(y.index_select(0, back), received, sent)
    return x.new_zeros(TOKENS, HIDDEN).index_add(0, token, returned)


def our_layer(x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The same by this package."""
    sent = cc.dispatch(x, idx, weights, num_experts=EXPERTS, group=dist.group.WORLD)
    return cc.combine(sent.x * sent.topk_weights[:, None], sent.handle)


def timed(step: Callable[[], object]) -> float:
    """Seconds of CALLS steps, all ranks starting together."""
    dist.barrier()
    started = time.perf_counter()
    for _ in range(CALLS):
        step()
    return time.perf_counter() - started


def rank_main(rank: int, world_size: int) -> dict[str, list[float]]:
    """Measure on one rank; returns the ratios of each round."""
    torch.manual_seed(rank)
    x = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    weights = torch.rand(TOKENS, CHOICES, requires_grad=True)
    idx = torch.rand(TOKENS, EXPERTS).topk(CHOICES, dim=1).indices
    grad = torch.randn(TOKENS, HIDDEN)
    bare_in = torch.randn(TOKENS * CHOICES, HIDDEN)
    bare_out = torch.empty_like(bare_in)

    def forward(layer: Callable[..., torch.Tensor]) -> torch.Tensor:
        with torch.no_grad():
            return layer(x, idx, weights)

    def both(layer: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        x.grad = weights.grad = None
        layer(x, idx, weights).backward(grad)
        return [t.grad for t in (x, weights) if t.grad is not None]

    torch.testing.assert_close(forward(our_layer), forward(plain_layer))
    for ours, plain in zip(both(our_layer), both(plain_layer), strict=True):
        torch.testing.assert_close(ours, plain)
    ratios: dict[str, list[float]] = {
        "forward": [],
        "step": [],
        "forward_floor": [],
        "step_floor": [],
    }
    for _ in range(ROUNDS):
        ours = timed(lambda: forward(our_layer))
        plain = timed(lambda: forward(plain_layer))
        bare = timed(lambda: dist.all_to_all_single(bare_out, bare_in))
        ours_step = timed(lambda: both(our_layer))
        plain_step = timed(lambda: both(plain_layer))
        ratios["forward"].append(ours / plain)
        ratios["step"].append(ours_step / plain_step)
        ratios["forward_floor"].append(ours / (2 * bare))
        ratios["step_floor"].append(ours_step / (4 * bare))
    return ratios


def across_hosts(rank: int, world_size: int) -> dict[str, list[float]]:
    """The same where ranks share no memory."""
    leave_shared_memory()
    return rank_main(rank, world_size)


def main() -> None:
    for place, fn in (("", rank_main), ("_across_hosts", across_hosts)):
        ratios: Any = run_ranks(fn, RANKS, timeout_s=900)[0]
        for name, figure in (
            ("forward_floor", "dispatch_forward_vs_bare_exchanges"),
            ("step_floor", "dispatch_step_vs_bare_exchanges"),
            ("forward", "dispatch_forward_vs_plain_torch"),
            ("step", "dispatch_step_vs_plain_torch"),
        ):
            low, middle, high = statistics.quantiles(ratios[name], n=4)
            values = {"value": round(middle, 3), "low": round(low, 3), "high": round(high, 3)}
            print(
                json.dumps(
                    {"figure": figure + place, **values, "unit": "x", "n": len(ratios[name])}
                )
            )


if __name__ == "__main__":
    main()
