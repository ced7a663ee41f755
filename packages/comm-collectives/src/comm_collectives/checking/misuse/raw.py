"""The same mistakes with raw torch.distributed, where they have a counterpart there.

RAW["op differs"](At(rank=1, size=2))
"""

import os
import signal
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.nn.functional import all_to_all_single as differentiable_all_to_all

from comm_collectives.checking.misuse.outcome import At, Misuse, nobody, the_first

_LONG = 1 << 16


def _raw_all_to_all(at: At, x: torch.Tensor | None = None) -> None:
    """Exchange evenly."""
    given = at.x[: 60 * at.size] if x is None else x
    dist.all_to_all_single(torch.empty_like(given), given)


def _gathered(at: At, x: torch.Tensor) -> None:
    dist.all_gather([torch.empty_like(x) for _ in range(at.size)], x)


def _raw_gather(at: At, dst: int) -> None:
    parts = [torch.empty(3000) for _ in range(at.size)] if at.rank == dst else None
    dist.gather(at.x, parts, dst=dst)


def _raw_scatter(at: At, src: int, parts: list[Any]) -> None:
    dist.scatter(torch.empty(3000), parts if at.rank == src else None, src=src)


def _raw_reduce_scatter(at: At, op: dist.ReduceOp.RedOpType) -> None:
    dist.reduce_scatter(torch.empty(60), list(at.x[: 60 * at.size].split(60)), op=op)


def _two_tensors(at: At) -> None:
    bias, scale = at.x, at.x
    for x in (scale, bias) if at.odd else (bias, scale):
        dist.all_reduce(x)


def _skips_a_call(at: At) -> None:
    first, second = at.x, at.x + 1
    if not at.odd:
        dist.all_reduce(first)
    dist.all_reduce(second)


def _operations(at: At, odd: Callable[[], Any], usual: Callable[[], Any]) -> None:
    (odd if at.odd else usual)()


def _async_out_of_order(at: At) -> None:
    first, second = at.x, at.x
    works: list[Any] = [
        dist.all_reduce(x, async_op=True) for x in at.pick([second, first], [first])
    ]
    works[0].wait()


def _object_lists(at: At) -> None:
    dist.broadcast_object_list([None] * (1 if at.odd else 3), src=0)


def _raw_splits_disagree(at: At) -> None:
    sent = [3000] + [0] * (at.size - 1)
    expected = [3000 if at.rank == 0 else 0] * at.size
    if at.odd:
        expected[0] += 1
    dist.all_to_all_single(torch.empty(sum(expected)), at.x, expected, sent)


def _bad_splits(at: At, splits: list[Any]) -> None:
    sent = splits if at.odd else [3000] + [0] * (at.size - 1)
    expected = [3000 if at.rank == 0 else 0] * at.size
    dist.all_to_all_single(torch.empty(sum(expected)), at.x, expected, sent)


def _changes_input(at: At) -> str:
    """All ranks send zeros; the odd one changes its own before they have gone."""
    x = torch.zeros(_LONG * at.size)
    y = torch.empty_like(x)
    work: Any = dist.all_to_all_single(y, x, async_op=True)
    if at.odd:
        x.add_(1)
    work.wait()
    return ""


def _unused_output(at: At) -> str:
    x = torch.ones(at.size, requires_grad=True)
    y = differentiable_all_to_all(torch.empty(at.size), x)
    if at.odd:
        del y
        return ""
    (grad,) = torch.autograd.grad(y.sum(), x)
    wanted = [1.0] * (at.size - 1) + [0.0]
    return "" if grad.tolist() == wanted else f"the gradient is {grad.tolist()}, not {wanted}"


def _swapped(at: At) -> str:
    x, y = torch.arange(4.0 * at.size) + at.rank, torch.zeros(4 * at.size)
    before = x.clone()
    dist.all_to_all_single(x, y)  # the output comes first
    return "" if torch.equal(x, before) else "the input was overwritten"


def _received(at: At, room: torch.Tensor) -> None:
    if at.odd:
        dist.send(at.x, dst=0)
    elif at.rank == 0:
        dist.recv(room, src=at.size - 1)


def _dies(at: At) -> None:
    dist.all_reduce(at.x)
    if at.odd:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(at.x)


_SUM, _MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX
RAW: dict[str, Callable[[At], Any]] = {
    "dtype differs, same bytes": lambda at: dist.all_reduce(at.pick(at.x.int(), at.x)),
    "dtype differs, other bytes": lambda at: dist.all_reduce(at.pick(at.x.half(), at.x)),
    "dtype differs, one number": lambda at: dist.all_reduce(at.pick(at.x[:1].int(), at.x[:1])),
    "dtype differs in all_to_all": lambda at: _raw_all_to_all(
        at, at.pick(at.x[: 60 * at.size].int(), at.x[: 60 * at.size])
    ),
    "dtype differs in all_gather": lambda at: _gathered(at, at.pick(at.x.int(), at.x)),
    "op differs": lambda at: dist.all_reduce(at.x, op=at.pick(_MAX, _SUM)),
    "op differs in reduce_scatter": lambda at: _raw_reduce_scatter(at, at.pick(_MAX, _SUM)),
    "lengths differ": lambda at: dist.all_reduce(at.x[: 3000 - at.odd]),
    "shapes differ, same length": lambda at: dist.all_reduce(at.pick(at.x.view(2, -1), at.x)),
    "same shape, other order": _two_tensors,
    "one rank skips a call": _skips_a_call,
    "all_reduce and all_to_all": lambda at: _operations(
        at, lambda: _raw_all_to_all(at), lambda: dist.all_reduce(at.x)
    ),
    "broadcast and all_to_all": lambda at: _operations(
        at, lambda: _raw_all_to_all(at), lambda: dist.broadcast(at.x, src=0)
    ),
    "all_reduce and broadcast_nested": lambda at: _operations(
        at,
        lambda: dist.broadcast_object_list([None], src=0),
        lambda: dist.all_reduce(at.x),
    ),
    "gather and scatter": lambda at: _operations(
        at, lambda: dist.scatter(torch.empty(3000), None, src=0), lambda: _raw_gather(at, 0)
    ),
    "asynchronous calls in another order": _async_out_of_order,
    "source differs in broadcast": lambda at: dist.broadcast(at.x, src=at.pick(at.rank, 0)),
    "source differs in broadcast_nested": lambda at: dist.broadcast_object_list(
        [at.x], src=at.pick(at.rank, 0)
    ),
    "destination differs in gather": lambda at: _raw_gather(at, at.pick(at.rank, 0)),
    "source differs in scatter": lambda at: _raw_scatter(at, at.pick(at.rank, 0), [at.x] * at.size),
    "receiver of a broadcast is longer": lambda at: dist.broadcast(
        at.pick(at.x, at.x[:2000]), src=0
    ),
    "receiver of a broadcast has another dtype": lambda at: dist.broadcast(
        at.pick(at.x.int(), at.x), src=0
    ),
    "splits disagree": _raw_splits_disagree,
    "lengths of object lists differ": _object_lists,
    "input and output swapped": _swapped,
    "receiver is shorter than the message": lambda at: _received(at, torch.empty(2000)),
    "receiver is longer than the message": lambda at: _received(at, torch.empty(4000)),
    "receiver has another dtype than the message": lambda at: _received(
        at, torch.empty(3000, dtype=torch.int32)
    ),
    "no tensor on one rank": lambda at: dist.all_reduce(at.pick([1.0], at.x)),
    "sparse tensor on one rank": lambda at: _gathered(at, at.pick(at.x.to_sparse(), at.x)),
    "tensor without data on one rank": lambda at: dist.all_reduce(at.pick(at.x.to("meta"), at.x)),
    "sum of fp8": lambda at: dist.all_reduce(at.x.to(torch.float8_e4m3fn)),
    "splits do not add up on one rank": lambda at: _bad_splits(at, [1] * at.size),
    "splits negative on one rank": lambda at: _bad_splits(at, [-1] * at.size),
    "splits no integers on one rank": lambda at: _bad_splits(at, [0.5] * at.size),
    "source outside the group on one rank": lambda at: dist.broadcast(
        at.x, src=at.pick(at.size, 0)
    ),
    "destination outside the group on one rank": lambda at: _raw_gather(at, at.pick(-1, 0)),
    "too few tensors to scatter": lambda at: _raw_scatter(at, 0, [at.x] * (at.size - 1)),
    "something else to scatter": lambda at: _raw_scatter(at, 0, [at.x] * (at.size - 1) + [None]),
    "tensors of two dtypes to scatter": lambda at: _raw_scatter(
        at, 0, [at.x] * (at.size - 1) + [at.x.int()]
    ),
    "input changed before wait": _changes_input,
    "output unused in backward on one rank": _unused_output,
    "one rank never comes to all_reduce": lambda at: (
        at.pick(None, dist.all_reduce) and dist.all_reduce(at.x)
    ),
    "one rank never comes to all_to_all": lambda at: None if at.odd else _raw_all_to_all(at),
    "one rank never comes to gather": lambda at: None if at.odd else _raw_gather(at, 0),
    "one rank never sends": lambda at: (
        None if at.odd else dist.recv(torch.empty(3), src=at.size - 1)
    ),
    "one rank dies": _dies,
}
# What cannot happen with this package, whose receivers are told what comes.
RAW_ONLY = (
    Misuse(name="lengths of object lists differ", run=_object_lists),
    Misuse(name="input and output swapped", run=_swapped, raised_by=nobody),
    *(
        Misuse(name=name, run=RAW[name], raised_by=the_first)
        for name in RAW
        if name.startswith("receiver ") and "broadcast" not in name
    ),
)
