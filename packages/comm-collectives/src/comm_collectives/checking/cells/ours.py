"""The cells of the matrix as calls of this package: the way that promises never to touch an input.

run_ours(case, group)      # "" if this rank got what it must, else what is wrong; collective
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from comm_collectives.base import as_bytes, dense, new_tensor
from comm_collectives.call.groups import Group, GroupState, group_state
from comm_collectives.call.handles import Handle
from comm_collectives.checking.cells.data import SCALAR, Placed, difference, place
from comm_collectives.checking.cells.problems import Case, Problem, problem_of
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
from comm_collectives.p2p import isend_tensors, recv, recv_tensors, send

_NOTHING = torch.empty(0)


def run_ours(case: Case, group: Group | None = None) -> str:
    """Run one cell on this rank; return what is wrong with its result or its input, or "".

    Collective over the group.

    Raises:
        CommError: what the call raises.
    """
    state = group_state(group)
    problem = problem_of(case, state.rank, state.size)
    placed = Placed(view=_NOTHING, problem=lambda: "")
    if problem.x is not None:
        placed = place(problem.x, case.shape)
    got = _CALL_OF[case.collective](_Run(case, placed.view, problem, state, group))
    if case.spoiled == "input":
        placed.view.add_(1)
    return compare(case, got, problem.want) or placed.problem()


def compare(case: Case, got: Any, want: torch.Tensor | None) -> str:
    """Return what is wrong with a result, or ""; a list is put together first."""
    if isinstance(got, str):
        return got
    if want is None or got is None:
        return "" if want is got else f"the result is {got!r}, not {want!r}"
    if isinstance(got, list | tuple):
        flat = [as_bytes(dense(part)) for part in got]
        got = torch.cat(flat).view(want.dtype).view(want.shape)
    if case.spoiled == "result":
        want = (as_bytes(want) + 1).view(want.dtype).view(want.shape)
    return difference(got, want)


@dataclass(frozen=True, slots=True)
class _Run:
    """A cell on this rank."""

    case: Case
    x: torch.Tensor
    problem: Problem
    state: GroupState
    group: Group | None

    @property
    def is_root(self) -> bool:
        """Whether this rank is the source or the destination."""
        return self.state.rank == self.problem.root

    def end(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Make a call, as the case says, and return its result."""
        if self.case.is_async:
            options["async_op"] = True
        result = call(*arguments, group=self.group, **options)
        return result.wait() if isinstance(result, Handle) else result


def _call_all_to_all(at: _Run) -> Any:
    # Every other shape names what it expects, as a program that knows does.
    received = at.problem.received if at.case.columns > 3 else None
    return at.end(all_to_all, at.x, input_splits=at.problem.sent, output_splits=received)


def _call_scatter(at: _Run) -> Any:
    parts = None
    if at.is_root:
        is_scalar = at.case.shape == SCALAR
        parts = [at.x] * at.state.size if is_scalar else list(at.x.split(at.problem.sent))
    return at.end(scatter, parts, src=at.problem.root)


def _nested(at: _Run) -> Any:
    name = str(at.case)
    value = {"x": [at.x, (1.5, None)], "name": name} if at.is_root else None
    got = at.end(broadcast_nested, value, src=at.problem.root)
    if not isinstance(got, dict) or got["name"] != name or got["x"][1] != (1.5, None):
        return f"the structure arrived as {got!r}"
    return got["x"][0]


def _neighbours(at: _Run) -> tuple[int, int]:
    return (at.state.rank + 1) % at.state.size, (at.state.rank - 1) % at.state.size


def _tensors(at: _Run) -> Any:
    """Every rank sends first, which must not wait for the receiver."""
    after, before = _neighbours(at)
    empty = new_tensor((0,), at.x.dtype, at.x.device)
    handle = isend_tensors([at.x, empty], dst=after, group=at.group)
    got, nothing = recv_tensors(src=before, group=at.group)
    handle.wait()
    return "an empty tensor arrived with elements" if nothing.numel() else got


def _send_and_recv(at: _Run) -> Any:
    after, before = _neighbours(at)
    handle = send(at.x, dst=after, group=at.group, async_op=True)
    result = at.end(recv, src=before)
    handle.wait()
    return result


_CALL_OF: dict[str, Callable[[_Run], Any]] = {
    "all_to_all": _call_all_to_all,
    "all_gather": lambda at: at.end(all_gather, at.x),
    "all_reduce": lambda at: at.end(all_reduce, at.x, op=at.case.op),
    "reduce_scatter": lambda at: at.end(
        reduce_scatter, at.x, splits=at.problem.sent, op=at.case.op
    ),
    "broadcast": lambda at: at.end(broadcast, at.x if at.is_root else None, src=at.problem.root),
    "gather": lambda at: at.end(gather, at.x, dst=at.problem.root),
    "scatter": _call_scatter,
    "broadcast_nested": _nested,
    "isend_tensors": _tensors,
    "send and recv": _send_and_recv,
}
