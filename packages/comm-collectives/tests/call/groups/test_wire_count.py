"""Bytes that reach the backend, counted there, are exactly those that the plan predicts."""

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import comm_collectives as cc
from comm_collectives.call.groups.wire_count import count_wire_bytes
from comm_collectives.moe.options import MoeOptions
from comm_collectives.planning.planner import bytes_for_routing
from comm_collectives.planning.wire.wire_format import RowFormat
from ranktest import run_ranks

_W, _E, _D = 4, 8, 20
_ROUTES: list[tuple[Any, int | None]] = [
    *(("flat", None), ("dedup", None)),
    *(("hierarchical", 1), ("hierarchical", 2), ("hierarchical", 4)),
]
_NAME_OF = {
    "dispatch": "dispatch",
    "dispatch_backward": "dispatch (backward)",
    "combine": "combine",
    "combine_backward": "combine (backward)",
}


def _choices(seed: int) -> list[Tensor]:
    """One routing: some ranks without tokens, some choices of no expert or of one expert twice."""
    generator = torch.Generator().manual_seed(seed)
    kind = seed % 4
    routing = []
    for rank in range(_W):
        tokens = (
            0 if kind == 1 and rank != 2 else int(torch.randint(1, 40, (), generator=generator))
        )
        num_choices = 1 + (seed // 4) % 5
        idx = torch.randint(-1, _E, (tokens, num_choices), generator=generator)
        if kind == 2:
            idx = torch.full((tokens, num_choices), 6)
        if kind == 3:
            idx = torch.full((tokens, num_choices), -1)
        routing.append(idx)
    return routing


@pytest.mark.parametrize(
    ("payload", "quantize_backward"), [("full", False), ("int8", False), ("float8_e4m3", True)]
)
@pytest.mark.parametrize(("route", "per_node"), _ROUTES)
def test_counted_bytes_equal_the_plan(
    route: Any, per_node: int | None, payload: Any, quantize_backward: bool
) -> None:
    first = 4 * random.randrange(10**6)
    routings = [(seed, _choices(seed)) for seed in range(first, first + 8)]
    dtypes = [(torch.float32, torch.float32), (torch.bfloat16, torch.float64)]
    options = MoeOptions(
        route=route,
        ranks_per_node=per_node,
        payload=payload,
        quantize_backward=quantize_backward,
        timeout_s=30,
    )

    def fn(rank: int, world_size: int) -> list[Any]:
        counted = []
        for _, routing in routings:
            for dtype, weight_dtype in dtypes:
                idx = routing[rank]
                with count_wire_bytes() as counting:
                    sent = cc.dispatch(
                        torch.randn(idx.shape[0], _D).to(dtype).requires_grad_(),
                        idx,
                        torch.rand(idx.shape, dtype=weight_dtype),
                        num_experts=_E,
                        group=dist.group.WORLD,
                        options=options,
                    )
                    cc.combine(sent.x, sent.handle).sum().backward()
                counted.append(counting.by_call)
        return counted

    by_rank: list[Any] = run_ranks(fn, _W)
    jobs = [(seed, routing, kinds) for seed, routing in routings for kinds in dtypes]
    for i, (seed, routing, (dtype, weight_dtype)) in enumerate(jobs):
        planned = bytes_for_routing(
            [idx.tolist() for idx in routing],
            RowFormat(
                hidden_size=_D,
                itemsize=dtype.itemsize,
                weight_itemsize=weight_dtype.itemsize,
                block_scaled=payload != "full",
            ),
            num_experts=_E,
            ranks_per_node=per_node or 1,
            route=route,
            quantize_backward=quantize_backward,
        )
        for movement, stages in planned.items():
            for rank in range(_W):
                rows = [stage.bytes_WW[rank] for stage in stages]
                want = tuple(map(sum, zip(*rows, strict=True)))
                got = by_rank[rank][i][_NAME_OF[movement]]
                assert got == want, (seed, movement, rank, dtype)


def test_counting_starts_and_ends_with_its_context() -> None:
    def fn(rank: int, world_size: int) -> None:
        x = torch.zeros(3, 4, dtype=torch.int16)
        splits = [1, 2] if rank == 0 else [2, 1]
        with count_wire_bytes() as outer:
            cc.all_to_all(x, input_splits=splits)
            with count_wire_bytes() as inner:
                cc.all_to_all(x, input_splits=splits)
        cc.all_to_all(x, input_splits=splits)
        assert inner.by_call == {"all_to_all": tuple(8 * n for n in splits)}
        assert inner.num_wire_bytes == 16
        assert outer.by_rank == tuple(16 * n for n in splits)
        with count_wire_bytes() as nothing:
            pass
        assert (nothing.by_rank, nothing.num_wire_bytes) == ((0, 0), 0)

    run_ranks(fn, 2)


def test_gathers_and_sums_count_like_exchanges_and_so_do_their_backwards() -> None:
    """Three ranks with one, two and three rows of 16 bytes."""

    def fn(rank: int, world_size: int) -> None:
        x = torch.zeros(rank + 1, 4, requires_grad=True)
        with count_wire_bytes() as counted:
            rows = cc.all_gather(x)
            own = cc.reduce_scatter(rows, splits=[1, 2, 3])
            forward = dict(counted.by_call)
            own.sum().backward()
        gathered, scattered = (16 * (rank + 1),) * 3, (16, 32, 48)
        assert forward == {"all_gather": gathered, "reduce_scatter": scattered}
        backward = [sent for name, sent in counted.by_call.items() if name not in forward]
        assert sorted(backward) == sorted([gathered, scattered]), counted.by_call

    run_ranks(fn, 3)
