"""Deliberate mistakes with dispatch and combine. Each line is that of a user's program.

MOE_MISUSES[0].run(At(rank=1, size=2))      # raises what its `error` says, on every rank
"""

import torch

from comm_collectives.checking.cells import as_group
from comm_collectives.checking.misuse.outcome import REFUSAL, TYPE_REFUSAL, At, Misuse
from comm_collectives.moe import Dispatched, MoeOptions, combine, dispatch

_HIDDEN = 8
_FP8 = MoeOptions(payload="float8_e4m3")
_DEDUP = MoeOptions(route="dedup")


def _dispatch(
    at: At,
    *,
    hidden: int = _HIDDEN,
    dtype: torch.dtype = torch.float32,
    weight_dtype: torch.dtype = torch.float32,
    choice: int = 0,
    num_experts: int | None = None,
    options: MoeOptions | None = None,
) -> Dispatched:
    """Dispatch four tokens with one choice each, all of the same expert."""
    return dispatch(
        torch.ones(4, hidden, dtype=dtype),
        torch.full((4, 1), choice),
        torch.ones(4, 1, dtype=weight_dtype),
        num_experts=num_experts or 2 * at.size,
        group=as_group(None),
        options=options or MoeOptions(),
    )


def _int32_choices(at: At) -> None:
    topk_idx = torch.zeros(4, 1, dtype=torch.int32 if at.odd else torch.int64)
    x, weights = torch.ones(4, _HIDDEN), torch.ones(4, 1)
    dispatch(x, topk_idx, weights, num_experts=at.size, group=as_group(None))


def _fewer_weights(at: At) -> None:
    weights = torch.ones(3 if at.odd else 4, 1)
    x, topk_idx = torch.ones(4, _HIDDEN), torch.zeros(4, 1, dtype=torch.int64)
    dispatch(x, topk_idx, weights, num_experts=at.size, group=as_group(None))


def _flat_tokens(at: At) -> None:
    x = torch.ones(4) if at.odd else torch.ones(4, _HIDDEN)
    topk_idx, weights = torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1)
    dispatch(x, topk_idx, weights, num_experts=at.size, group=as_group(None))


def _aligned(at: At) -> None:
    x, weights = torch.ones(4, _HIDDEN), torch.ones(4, 1)
    topk_idx, rows = torch.zeros(4, 1, dtype=torch.int64), 0 if at.odd else 1
    group = as_group(None)
    dispatch(x, topk_idx, weights, num_experts=at.size, group=group, expert_alignment=rows)


def _combine(at: At, *, rows: int = 0, dtype: torch.dtype = torch.float32, hidden: int = 8) -> None:
    """Combine rows of ones after a dispatch that went well."""
    handle = _dispatch(at).handle
    combine(torch.ones(handle.num_rows + rows, hidden, dtype=dtype), handle)


def _reuses(at: At) -> None:
    handle = _dispatch(at).handle
    _dispatch(at, options=MoeOptions(reuse=handle) if at.odd else MoeOptions())


def _reuses_other_choices(at: At) -> None:
    handle = _dispatch(at).handle
    _dispatch(at, choice=1 if at.odd else 0, options=MoeOptions(reuse=handle))


def _combines_other_dispatch(at: At) -> None:
    """Two dispatches whose rows are as many but lie in another order."""
    group, tokens = as_group(None), 2 * at.size
    x, weights = torch.ones(tokens, _HIDDEN), torch.ones(tokens, 1)
    upwards = torch.arange(tokens).unsqueeze(1)
    first = dispatch(x, upwards, weights, num_experts=tokens, group=group)
    second = dispatch(x, upwards.flip(0), weights, num_experts=tokens, group=group)
    combine(first.x, second.handle if at.odd else first.handle)


MOE_MISUSES = (
    Misuse(
        name="dispatch: expert out of range on one rank",
        run=lambda at: _dispatch(at, choice=at.pick(2 * at.size, 0)),
        error=REFUSAL,
        says=("topk_idx holds", "{odd}: "),
    ),
    Misuse(
        name="dispatch: expert negative on one rank",
        run=lambda at: _dispatch(at, choice=at.pick(-2, 0)),
        error=REFUSAL,
        says=("topk_idx holds -2", "{odd}: "),
    ),
    Misuse(
        name="dispatch: choices of another dtype on one rank",
        run=_int32_choices,
        error=TYPE_REFUSAL,
        says=("topk_idx is torch.int32", "{odd}: "),
    ),
    Misuse(
        name="dispatch: fewer weights than tokens on one rank",
        run=_fewer_weights,
        error=REFUSAL,
        says=("topk_weights has shape (3, 1)", "{odd}: "),
    ),
    Misuse(
        name="dispatch: tokens without dims on one rank",
        run=_flat_tokens,
        error=REFUSAL,
        says=("x has shape (4,)", "{odd}: "),
    ),
    Misuse(
        name="dispatch: alignment 0 on one rank",
        run=_aligned,
        error=REFUSAL,
        says=("expert_alignment=0", "{odd}: "),
    ),
    Misuse(
        name="dispatch: num_experts differs",
        run=lambda at: _dispatch(at, num_experts=at.pick(3, 2) * at.size),
        says=("num_experts=", "{odd}: "),
    ),
    Misuse(
        name="dispatch: num_experts not divisible on one rank",
        run=lambda at: _dispatch(at, num_experts=2 * at.size + at.odd),
        error=REFUSAL,
        says=("num_experts=", "{odd}: "),
    ),
    Misuse(
        name="dispatch: hidden size differs",
        run=lambda at: _dispatch(at, hidden=at.pick(2, 1) * _HIDDEN),
        says=("hidden size", "=16", "{odd}: "),
    ),
    Misuse(
        name="dispatch: dtype differs",
        run=lambda at: _dispatch(at, dtype=at.pick(torch.bfloat16, torch.float16)),
        says=("dtype", "bfloat16", "float16", "{odd}: "),
    ),
    Misuse(
        name="dispatch: dtype of the weights differs",
        run=lambda at: _dispatch(at, weight_dtype=at.pick(torch.float64, torch.float32)),
        says=("dtype of topk_weights", "float64", "{odd}: "),
    ),
    Misuse(
        name="dispatch: route differs",
        run=lambda at: _dispatch(at, options=at.pick(_DEDUP, None)),
        says=("route", "dedup", "flat", "{odd}: "),
    ),
    Misuse(
        name="dispatch: payload differs",
        run=lambda at: _dispatch(at, options=at.pick(_FP8, None)),
        says=("payload", "float8_e4m3", "full", "{odd}: "),
    ),
    Misuse(
        name="dispatch: one rank reuses a handle",
        run=_reuses,
        says=("reuse", "{odd}: "),
    ),
    Misuse(
        name="dispatch: a handle reused for other choices on one rank",
        run=_reuses_other_choices,
        error=REFUSAL,
        says=("reuse", "{odd}: "),
    ),
    Misuse(
        name="combine: handle of another dispatch on one rank",
        run=_combines_other_dispatch,
        says=("dispatch", "{odd}: "),
    ),
    Misuse(
        name="combine: a row too many on one rank",
        run=lambda at: _combine(at, rows=int(at.odd)),
        error=REFUSAL,
        says=("y has shape", "{odd}: "),
    ),
    Misuse(
        name="combine: rows of integers on one rank",
        run=lambda at: _combine(at, dtype=at.pick(torch.int32, torch.float32)),
        error=TYPE_REFUSAL,
        says=("y is torch.int32", "{odd}: "),
    ),
    Misuse(
        name="combine: hidden size differs",
        run=lambda at: _combine(at, hidden=at.pick(16, 8)),
        says=("hidden size", "=16", "{odd}: "),
    ),
    Misuse(
        name="combine: dtype differs",
        run=lambda at: _combine(at, dtype=at.pick(torch.float64, torch.float32)),
        says=("dtype", "float64", "{odd}: "),
    ),
)
