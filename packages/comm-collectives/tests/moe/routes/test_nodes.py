"""The hierarchical route: whole nodes only, and a token crosses to each node once."""

import random
from typing import Any

import torch
import torch.distributed as dist

import comm_collectives as cc
from comm_collectives.call.groups.wire_count import count_wire_bytes
from comm_collectives.moe.options import MoeOptions
from ranktest import collect_ranks, run_ranks


def test_nodes_that_do_not_divide_the_group_are_refused_on_every_rank() -> None:
    def fn(rank: int, world_size: int) -> None:
        options = MoeOptions(route="hierarchical", ranks_per_node=3 if rank == 1 else 2)
        x, idx = torch.ones(2, 3), torch.zeros(2, 1, dtype=torch.int64)
        group = dist.group.WORLD
        cc.dispatch(x, idx, torch.ones(2, 1), num_experts=4, group=group, options=options)

    outcomes = collect_ranks(fn, 4, timeout_s=30)
    assert [o.error_type for o in outcomes] == ["RefusedError"] * 4
    for outcome in outcomes:
        assert "rank 1: the group has 4 ranks but ranks_per_node=3" in str(outcome.error)


def test_ranks_of_another_local_index_on_another_node_are_never_written_to() -> None:
    def fn(rank: int, world_size: int) -> None:
        options = MoeOptions(route="hierarchical", ranks_per_node=2)
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(20, 4, generator=generator, requires_grad=True)
        idx = torch.rand(20, 8, generator=generator).topk(3, dim=1).indices
        group = dist.group.WORLD
        with count_wire_bytes() as counted:
            sent = cc.dispatch(
                x, idx, torch.ones(20, 3), num_experts=8, group=group, options=options
            )
            cc.combine(sent.x, sent.handle).sum().backward()
        assert len(counted.by_call) == 4
        for other, num_bytes in enumerate(counted.by_rank):
            reaches = other // 2 == rank // 2 or other % 2 == rank % 2
            assert (num_bytes > 0) == reaches, (rank, other)

    run_ranks(fn, 4)


def test_a_token_crosses_to_each_node_once() -> None:
    """All eight choices of each token lie on the other node: one row each, not eight."""
    seed = random.randrange(10**9)

    def fn(rank: int, world_size: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed + rank)
        tokens, hidden = 6, 64
        x = torch.randn(tokens, hidden, generator=generator)
        first = 8 * (1 - rank // 2)
        idx = first + torch.rand(tokens, 8, generator=generator).argsort(dim=1)
        crossed = []
        routes: tuple[dict[str, Any], ...] = (
            {"route": "hierarchical", "ranks_per_node": 2},
            {"route": "dedup"},
            {"route": "flat"},
        )
        for route in routes:
            with count_wire_bytes() as counted:
                sent = cc.dispatch(
                    *(x, idx, torch.ones(tokens, 8)),
                    num_experts=16,
                    group=dist.group.WORLD,
                    options=MoeOptions(**route),
                )
                cc.combine(sent.x, sent.handle)
            out = counted.by_call["dispatch"]
            crossed.append(sum(n for other, n in enumerate(out) if other // 2 != rank // 2))
        return crossed

    row = 64 * 4  # bytes
    for nodes, ranks, flat in run_ranks(fn, 4):
        assert nodes == (6 + 2) * row, f"seed {seed}"  # what 48 choices say fills 1.5 rows
        assert ranks == 2 * (6 + 1) * row, f"seed {seed}"
        assert flat == 2 * (24 + 1) * row, f"seed {seed}"
