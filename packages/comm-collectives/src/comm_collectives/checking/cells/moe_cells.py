"""The cells of the matrix for dispatch and combine: every route and payload, ugly routings too.

Experts do nothing but apply their weight, so each token comes back as the sum of its weights times
itself. The values survive every payload: small integers beside one that sets the scale to 1.

    run_moe(case, group)      # "" or what is wrong; collective
"""

from dataclasses import dataclass

import torch

from comm_collectives.call.groups import Group, group_state
from comm_collectives.call.handles import Handle
from comm_collectives.checking.cells.data import difference, index_of, place
from comm_collectives.checking.cells.problems import (
    EMPTY,
    EVEN,
    EXPANDED,
    ONE_EMPTY,
    STRIDED,
    UNEVEN,
    Case,
)
from comm_collectives.errors import CommValueError
from comm_collectives.moe import MoeOptions, combine, combine_async, dispatch, dispatch_async
from comm_collectives.moe.rows import Payload
from comm_collectives.planning.wire import Route

NO_EXPERT = "no expert"
MOE_SHAPES = (EVEN, UNEVEN, EMPTY, ONE_EMPTY, STRIDED, EXPANDED, NO_EXPERT)
MOE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_ROUTES: tuple[Route, ...] = ("flat", "dedup", "hierarchical")
_PAYLOADS: tuple[Payload, ...] = ("full", "float8_e4m3", "int8")
_BLOCK = 128
_CHOICES = 3


@dataclass(frozen=True, slots=True)
class _Way:
    route: Route
    payload: Payload


_WAY_OF = {
    f"dispatch {route} {payload}": _Way(route, payload)
    for route in _ROUTES
    for payload in _PAYLOADS
}
MOE_COLLECTIVES = tuple(_WAY_OF)


def run_moe(case: Case, group: Group | None = None) -> str:
    """Run one cell on this rank; return what is wrong with its result or its inputs, or "".

    Collective over the group.

    Raises:
        CommError: what the calls raise.
    """
    state = group_state(group)
    way = _WAY_OF[case.collective]
    per_node = 2 if state.size % 2 == 0 and state.size > 2 else 1
    options = MoeOptions(
        route=way.route,
        payload=way.payload,
        ranks_per_node=per_node if way.route == "hierarchical" else None,
    )
    num_experts = 2 * state.size
    x = _tokens(case, way.payload, state.rank)
    topk_idx, weights = _choices(case, len(x), num_experts, state.rank)
    # What a token without an expert weighs does not count.
    total = weights.where(topk_idx >= 0, torch.zeros_like(weights)).sum(1, keepdim=True)
    placed = place(x, case.shape)
    start = dispatch_async if case.is_async else dispatch
    result = start(
        placed.view,
        topk_idx,
        weights,
        num_experts=num_experts,
        group=as_group(group),
        expert_alignment=1 + state.rank % 2,
        options=options,
    )
    sent = result.wait() if isinstance(result, Handle) else result
    rows = sent.x * sent.topk_weights[:, None]
    bring_back = combine_async if case.is_async else combine
    combined = bring_back(rows, sent.handle)
    out = combined.wait() if isinstance(combined, Handle) else combined
    return difference(out, x * total) or placed.problem()


def as_group(group: Group | None) -> Group:
    """Return the group itself: None means one rank alone to `dispatch`."""
    if group is not None:
        return group
    default = torch.distributed.group.WORLD
    if default is None:
        raise CommValueError("there is no default group; call init_process_group or pass group=")
    return default


def _tokens(case: Case, payload: Payload, rank: int) -> torch.Tensor:
    tokens = {EVEN: 6, UNEVEN: 5 * rank, EMPTY: 0, ONE_EMPTY: 3 * rank}.get(case.shape, 4)
    index = index_of(case.shape, rows=tokens, columns=case.columns)
    x = (index % 7 + rank).to(case.dtype)
    if payload != "full":
        x[:, ::_BLOCK] = 448 if payload == "float8_e4m3" else 127
    return x


def _choices(
    case: Case, tokens: int, num_experts: int, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    number = torch.arange(tokens * _CHOICES).view(tokens, _CHOICES)
    # Neighbours in a row of choices are often the same expert twice.
    topk_idx = (number // 2 * 3 + rank) % num_experts
    if case.shape == UNEVEN:
        topk_idx = torch.full_like(topk_idx, num_experts - 1)
    if case.shape == NO_EXPERT:
        topk_idx = topk_idx.where(number % 4 != 1, -1)
        topk_idx[:1] = -1
    weights = torch.tensor([0.0, 1.0, 1.0])[number % _CHOICES].roll(rank, 1)
    return topk_idx, weights.to(case.dtype)
