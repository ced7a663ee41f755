"""Bytes that dispatch and combine hand to the backend, counted there, against what a plan predicts.

Four gloo ranks, two of them to a node, 64 experts, top 8, bf16 rows, fp32 weights; all routes, in
full and as float8, all four movements of a step. Two comparisons:

- with the plan of that very routing, rank by rank and movement by movement: must be equal;
- with the closed form for uniform routing (768 tokens per rank, expected numbers of unique tokens):
  `wire_bytes_vs_plan_error` is the largest relative error over routes, payloads and movements.

`fp8_dispatch_bytes_vs_bf16` is the counted bytes of a float8 dispatch at hidden size 7168 over
those of bf16, on the route where that is largest.

    python benchmarks/comm_collectives_wire_bytes.py
"""

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

import comm_collectives as cc
from comm_collectives.call.groups import count_wire_bytes
from comm_collectives.moe import MoeOptions
from comm_collectives.planning import (
    Workload,
    bytes_for_routing,
    plan_dispatch,
    topology_preset,
)
from comm_collectives.planning.wire import MOVEMENTS
from ranktest import run_ranks

RANKS, PER_NODE, EXPERTS, CHOICES, TOKENS = 4, 2, 64, 8, 768
ROUTES: tuple[Any, ...] = ("flat", "dedup", "hierarchical")
PAYLOADS: tuple[Any, ...] = ("full", "float8_e4m3")
NAME_OF = {
    "dispatch": "dispatch",
    "dispatch_backward": "dispatch (backward)",
    "combine": "combine",
    "combine_backward": "combine (backward)",
}
Counted = dict[tuple[str, str], Mapping[str, tuple[int, ...]]]


def routing(rank: int, tokens: int) -> torch.Tensor:
    """Uniform choices of one rank, the same in every process."""
    generator = torch.Generator().manual_seed(1000 + rank)
    return torch.rand(tokens, EXPERTS, generator=generator).topk(CHOICES, dim=1).indices


def count(rank: int, hidden: int, tokens: int) -> Counted:
    """Bytes of this rank by call, for each route and payload."""
    counted: Counted = {}
    for route in ROUTES:
        for payload in PAYLOADS:
            options = MoeOptions(
                route=route,
                ranks_per_node=PER_NODE if route == "hierarchical" else None,
                payload=payload,
            )
            x = torch.randn(tokens, hidden, dtype=torch.bfloat16).requires_grad_()
            with count_wire_bytes() as counting:
                sent = cc.dispatch(
                    x,
                    routing(rank, tokens),
                    torch.rand(tokens, CHOICES),
                    num_experts=EXPERTS,
                    group=dist.group.WORLD,
                    options=options,
                )
                cc.combine(sent.x, sent.handle).sum().backward()
            counted[route, payload] = counting.by_call
    return counted


def rank_main(rank: int, world_size: int) -> tuple[Counted, Counted]:
    """Count at a small hidden size for all figures, and at 7168 for the ratio of payloads."""
    return count(rank, 512, TOKENS), count(rank, 7168, 128)


def off_rank(by_rank: list[Counted], key: tuple[str, str], name: str) -> int:
    """Bytes of all ranks to other ranks in one movement."""
    rows = [counted[key][name] for counted in by_rank]
    return sum(sum(row) - row[rank] for rank, row in enumerate(rows))


def main() -> None:
    """Count, compare and print the figures."""
    results: Any = run_ranks(rank_main, RANKS, timeout_s=600)
    small, large = ([both[i] for both in results] for i in range(2))
    chosen = [routing(rank, TOKENS).tolist() for rank in range(RANKS)]
    workload = Workload(num_experts=EXPERTS, topk=CHOICES, hidden_size=512, tokens_per_rank=TOKENS)
    topology = topology_preset("h100-nccl", nodes=RANKS // PER_NODE, gpus_per_node=PER_NODE)
    plan = plan_dispatch(workload, topology)
    differing, errors = 0, []
    for key in small[0]:
        route, payload = key
        row_format = workload.row_format(payload)
        planned = bytes_for_routing(
            chosen, row_format, num_experts=EXPERTS, ranks_per_node=PER_NODE, route=route
        )
        for movement in MOVEMENTS:
            name = NAME_OF[movement]
            for rank in range(RANKS):
                rows = [stage.bytes_WW[rank] for stage in planned[movement]]
                want = tuple(map(sum, zip(*rows, strict=True)))
                differing += small[rank][key][name] != want
            uniform = plan.variant(route, payload).movement(movement)
            closed = RANKS * (uniform.total("intra_bytes") + uniform.total("inter_bytes"))
            error = off_rank(small, key, name) / closed - 1
            errors.append(error)
            print(f"{route:12} {payload:11} {movement:17} {closed:10} B planned, {error:+.3%}")
    ratios = [
        off_rank(large, (route, "float8_e4m3"), "dispatch")
        / off_rank(large, (route, "full"), "dispatch")
        for route in ROUTES
    ]
    num_compared = len(small[0]) * len(MOVEMENTS) * RANKS
    for figure, value, unit, n in (
        ("wire_bytes_other_than_planned", differing, "lists", num_compared),
        ("wire_bytes_vs_plan_error", 100 * max(map(abs, errors)), "%", len(errors)),
        ("fp8_dispatch_bytes_vs_bf16", max(ratios), "x", len(ratios)),
    ):
        print(json.dumps({"figure": figure, "value": round(value, 4), "unit": unit, "n": n}))


if __name__ == "__main__":
    main()
