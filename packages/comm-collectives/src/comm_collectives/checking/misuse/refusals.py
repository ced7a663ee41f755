"""Arguments that are wrong on one rank, on purpose. Each line is that of a user's program.

REFUSALS[0].run(At(rank=1, size=2))      # a RefusedError on every rank
"""

import warnings
from typing import Any

import torch

from comm_collectives.checking.misuse.outcome import REFUSAL, TYPE_REFUSAL, At, Misuse
from comm_collectives.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    gather,
    reduce_scatter,
    scatter,
)
from comm_collectives.nested import broadcast_nested


def _scatters(at: At, value: Any) -> None:
    scatter(value if at.rank == 0 else None, src=0)


def _quantised(x: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch will drop these dtypes one day
        return torch.quantize_per_tensor(x, 0.5, 0, torch.qint8)


REFUSALS = (
    Misuse(
        name="op unknown on one rank",
        run=lambda at: all_reduce(at.x, op="mean" if at.odd else "sum"),
        error=REFUSAL,
        says=("op='mean'", "{odd}: "),
    ),
    Misuse(
        name="op unknown on one rank, one number",
        run=lambda at: all_reduce(at.x[:1], op="mean" if at.odd else "sum"),
        error=REFUSAL,
        says=("op='mean'", "{odd}: "),
    ),
    Misuse(
        name="no tensor on one rank",
        run=lambda at: all_reduce(at.pick([1.0], at.x)),
        error=TYPE_REFUSAL,
        says=("list", "{odd}: "),
    ),
    Misuse(
        name="sparse tensor on one rank",
        run=lambda at: all_gather(at.x.to_sparse() if at.odd else at.x),
        error=TYPE_REFUSAL,
        says=("sparse", "{odd}: "),
    ),
    Misuse(
        name="tensor without data on one rank",
        run=lambda at: reduce_scatter(at.x.to("meta" if at.odd else "cpu"), splits=at.splits),
        error=TYPE_REFUSAL,
        says=("meta", "{odd}: "),
    ),
    Misuse(
        name="quantised tensor on one rank",
        run=lambda at: broadcast(_quantised(at.x) if at.odd else at.x, src=0),
        error=TYPE_REFUSAL,
        says=("x ", "{odd}: "),
    ),
    Misuse(
        name="no dims on one rank",
        run=lambda at: all_to_all(at.x[0] if at.odd else at.x, input_splits=at.splits),
        error=REFUSAL,
        says=("x has no dims", "{odd}: "),
    ),
    Misuse(
        name="no dims on one rank in all_gather",
        run=lambda at: all_gather(at.x[0] if at.odd else at.x),
        error=REFUSAL,
        says=("x has no dims", "{odd}: "),
    ),
    Misuse(
        name="sum of fp8",
        run=lambda at: all_reduce(at.x.to(torch.float8_e4m3fn)),
        error=TYPE_REFUSAL,
        says=("float8_e4m3fn", "op='sum'"),
    ),
    Misuse(
        name="sum of bool on one rank",
        run=lambda at: reduce_scatter(at.x.bool() if at.odd else at.x, splits=at.splits),
        error=TYPE_REFUSAL,
        says=("torch.bool", "{odd}: "),
    ),
    Misuse(
        name="splits do not add up on one rank",
        run=lambda at: all_to_all(at.x, input_splits=[1] * at.size if at.odd else at.splits),
        error=REFUSAL,
        says=("input_splits", "{odd}: "),
    ),
    Misuse(
        name="splits do not add up on one rank in reduce_scatter",
        run=lambda at: reduce_scatter(at.x, splits=[1] * at.size if at.odd else at.splits),
        error=REFUSAL,
        says=("splits", "{odd}: "),
    ),
    Misuse(
        name="splits negative on one rank",
        run=lambda at: all_to_all(at.x, input_splits=[-1] * at.size if at.odd else at.splits),
        error=REFUSAL,
        says=("input_splits", "{odd}: "),
    ),
    Misuse(
        name="splits no integers on one rank",
        run=lambda at: all_to_all(at.x, input_splits=at.pick([0.5] * at.size, at.splits)),
        error=TYPE_REFUSAL,
        says=("input_splits", "{odd}: "),
    ),
    Misuse(
        name="too many output_splits on one rank",
        run=lambda at: all_to_all(
            at.x,
            input_splits=at.splits,
            output_splits=[3000 if at.rank == 0 else 0] * (at.size + at.odd),
        ),
        error=REFUSAL,
        says=("output_splits", "{odd}: "),
    ),
    Misuse(
        name="source outside the group on one rank",
        run=lambda at: broadcast(at.x, src=at.size if at.odd else 0),
        error=REFUSAL,
        says=("src=", "{odd}: "),
    ),
    Misuse(
        name="destination outside the group on one rank",
        run=lambda at: gather(at.x, dst=-1 if at.odd else 0),
        error=REFUSAL,
        says=("dst=-1", "{odd}: "),
    ),
    Misuse(
        name="source gives None",
        run=lambda at: broadcast(None, src=0),
        error=TYPE_REFUSAL,
        says=("NoneType", "rank 0: "),
    ),
    Misuse(
        name="too few tensors to scatter",
        run=lambda at: _scatters(at, [at.x] * (at.size - 1)),
        error=REFUSAL,
        says=("tensors", "rank 0: "),
    ),
    Misuse(
        name="something else to scatter",
        run=lambda at: _scatters(at, [at.x] * (at.size - 1) + [None]),
        error=TYPE_REFUSAL,
        says=("NoneType", "rank 0: "),
    ),
    Misuse(
        name="tensors of two dtypes to scatter",
        run=lambda at: _scatters(at, [at.x] * (at.size - 1) + [at.x.int()]),
        error=REFUSAL,
        says=("kinds", "rank 0: "),
    ),
    Misuse(
        name="a value that cannot be broadcast",
        run=lambda at: broadcast_nested({"x": [at.x, object()]}, src=0),
        error=TYPE_REFUSAL,
        says=("object", "rank 0: "),
    ),
    Misuse(
        name="limit of no seconds on one rank",
        run=lambda at: all_reduce(at.x, timeout_s=-1.0 if at.odd else 5.0),
        error=REFUSAL,
        says=("timeout_s=-1", "{odd}: "),
    ),
)
