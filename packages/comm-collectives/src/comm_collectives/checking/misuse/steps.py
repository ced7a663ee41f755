"""The calls of the table of mistakes, made from their names and arguments, by us or by bare torch.

What a rank does is data: steps, each a call's name and what it changes in the usual arguments.
An argument that is a function is asked for its value on this rank.

    run_steps((("all_reduce", {"op": "max"}),), At(rank=1, size=2), OURS)
"""

import os
import signal
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from comm_collectives.call.signature import call_site
from comm_collectives.checking.cells import as_group
from comm_collectives.checking.misuse.outcome import At
from comm_collectives.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    drop_in,
    gather,
    reduce_scatter,
    scatter,
)
from comm_collectives.moe import MoeOptions, combine, dispatch
from comm_collectives.nested import broadcast_nested
from comm_collectives.p2p import recv_tensors

Step = tuple[str, Mapping[str, Any]]
Make = Callable[..., Any]
SITE, ASYNC = "site", "async_op"  # a step's name for its place, and whether it is waited for later
HIDDEN = 8


def rows(ranks: int = 1) -> torch.Tensor:
    """50 rows of two numbers for each of so many ranks: more than one small message holds."""
    return torch.ones(50 * ranks, 2)


def dispatch_given(at: At, given: Mapping[str, Any]) -> Any:
    """Dispatch four tokens with one choice each, all of the same expert."""
    changed = dict(given)
    hidden, dtype = changed.pop("hidden", HIDDEN), changed.pop("dtype", torch.float32)
    usual: dict[str, Any] = {
        "x": torch.ones(4, hidden, dtype=dtype),
        "topk_idx": torch.full((4, 1), changed.pop("choice", 0)),
        "topk_weights": torch.ones(4, 1, dtype=changed.pop("weight_dtype", torch.float32)),
        "num_experts": 2 * at.size,
        "options": MoeOptions(),
    }
    device = torch.get_default_device()  # that of a mistake is where the table was imported
    moved = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in changed.items()}
    return dispatch(**{**usual, **moved}, group=as_group(None))


def _combine(at: At, given: Mapping[str, Any]) -> Any:
    """Combine rows of ones after a dispatch that went well."""
    handle = dispatch_given(at, {}).handle
    num_rows = handle.num_rows + given.get("more", 0)
    y = torch.ones(num_rows, given.get("hidden", HIDDEN), dtype=given.get("dtype", torch.float32))
    return combine(y, handle)


def _die(at: At, given: Mapping[str, Any]) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _plain(function: Make) -> Make:
    return lambda at, given: function(**given)


_X: dict[str, Any] = {"x": lambda at: at.x}
# By name: the call, and its usual arguments.
OURS: dict[str, tuple[Make, dict[str, Any]]] = {
    "all_reduce": (_plain(all_reduce), _X),
    "all_gather": (_plain(all_gather), _X),
    "all_to_all": (_plain(all_to_all), {**_X, "input_splits": lambda at: at.splits}),
    "reduce_scatter": (_plain(reduce_scatter), {**_X, "splits": lambda at: at.splits}),
    "broadcast": (_plain(broadcast), {**_X, "src": 0}),
    "broadcast_nested": (_plain(broadcast_nested), {"obj": lambda at: {"x": at.x}, "src": 0}),
    "gather": (_plain(gather), {**_X, "dst": 0}),
    "scatter": (_plain(scatter), {"tensors": lambda at: [at.x] * at.size, "src": 0}),
    "recv_tensors": (_plain(recv_tensors), {"src": lambda at: at.size - 1}),
    "dispatch": (dispatch_given, {}),
    "combine": (_combine, {}),
    "torch all_reduce": (_plain(drop_in.all_reduce), {"tensor": lambda at: at.x}),
    "torch broadcast": (_plain(drop_in.broadcast), {"tensor": lambda at: at.x, "src": 0}),
    "torch all_gather_into_tensor": (
        _plain(drop_in.all_gather_into_tensor),
        {"output_tensor": lambda at: rows(at.size), "input_tensor": lambda at: rows()},
    ),
    "torch reduce_scatter_tensor": (
        _plain(drop_in.reduce_scatter_tensor),
        {"output": lambda at: rows(), "input": lambda at: rows(at.size)},
    ),
    "torch all_to_all_single": (
        _plain(drop_in.all_to_all_single),
        {"output": lambda at: rows(at.size), "input": lambda at: rows(at.size)},
    ),
    "die": (_die, {}),
}


def _raw_all_to_all(at: At, x: Any, input_splits: Any, output_splits: Any = None) -> None:
    expected = output_splits or [3000 if at.rank == 0 else 0] * at.size
    dist.all_to_all_single(torch.empty(sum(expected)), x, expected, input_splits)


def _outputs(at: At) -> list[torch.Tensor]:
    return [torch.empty(3000) for _ in range(at.size)]


# torch.distributed itself, given the arguments of our calls.
RAW_CALLS: dict[str, Make] = {
    "all_reduce": lambda at, x, op="sum", **how: dist.all_reduce(
        x, op=getattr(dist.ReduceOp, op.upper()), **how
    ),
    "all_gather": lambda at, x, **how: dist.all_gather(_outputs(at), x, **how),
    "all_to_all": _raw_all_to_all,
    "broadcast": lambda at, x, src: dist.broadcast(x, src=src),
    "broadcast_nested": lambda at, obj, src: dist.broadcast_object_list([obj], src=src),
    "gather": lambda at, x, dst: dist.gather(x, _outputs(at) if at.rank == dst else None, dst=dst),
    "scatter": lambda at, tensors, src: dist.scatter(
        torch.empty(3000), tensors if at.rank == src else None, src=src
    ),
    "die": lambda at: _die(at, {}),
}


def run_steps(steps: Iterable[Step], at: At, *, raw: bool = False) -> None:
    """Make the calls in turn; asynchronous ones are waited for at the end."""
    handles: list[Any] = []
    for name, changes in steps:
        ours, usual = OURS[name]
        given = {**usual, **changes}
        site = given.pop(SITE, "")
        arguments = {key: v(at) if callable(v) else v for key, v in given.items()}
        if raw:
            arguments.pop("timeout_s", None)  # the group's own limit is short enough
            result = RAW_CALLS[name](at, **arguments)
        else:
            with call_site(site) if site else nullcontext():
                result = ours(at, arguments)
        handles += [result] if arguments.get(ASYNC) else []
    for handle in handles:
        handle.wait()
