"""The cells of the matrix as calls of this package: the way that promises never to touch an input.

run_ours(case, group)      # "" if this rank got what it must, else what is wrong; collective
"""

from collections.abc import Callable
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
    result = _CALL_OF[case.collective](case, placed.view, problem, state, group)
    got = result.wait() if isinstance(result, Handle) else result
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


def _options(case: Case, group: Group | None) -> dict[str, Any]:
    return {"group": group, "async_op": True} if case.is_async else {"group": group}


def _call_all_to_all(
    case: Case, x: torch.Tensor, problem: Problem, state: GroupState, group: Group | None
) -> Any:
    # Every other shape names what it expects, as a program that knows does.
    received = problem.received if case.columns > 3 else None
    options = _options(case, group)
    return all_to_all(x, input_splits=problem.sent, output_splits=received, **options)


def _call_reduce_scatter(
    case: Case, x: torch.Tensor, problem: Problem, state: GroupState, group: Group | None
) -> Any:
    return reduce_scatter(x, splits=problem.sent, op=case.op, **_options(case, group))


def _call_scatter(
    case: Case, x: torch.Tensor, problem: Problem, state: GroupState, group: Group | None
) -> Any:
    parts = None
    if state.rank == problem.root:
        parts = [x] * state.size if case.shape == SCALAR else list(x.split(problem.sent))
    return scatter(parts, src=problem.root, **_options(case, group))


def _call_broadcast(
    case: Case, x: torch.Tensor, problem: Problem, state: GroupState, group: Group | None
) -> Any:
    given = x if state.rank == problem.root else None
    return broadcast(given, src=problem.root, **_options(case, group))


def _nested(
    case: Case, x: torch.Tensor, problem: Problem, state: GroupState, group: Group | None
) -> Any:
    name = str(case)
    value = {"x": [x, (1.5, None)], "name": name} if state.rank == problem.root else None
    result: Any = broadcast_nested(value, src=problem.root, **_options(case, group))
    got = result.wait() if isinstance(result, Handle) else result
    if not isinstance(got, dict) or got["name"] != name or got["x"][1] != (1.5, None):
        return f"the structure arrived as {got!r}"
    return got["x"][0]


def _tensors(
    case: Case, x: torch.Tensor, problem: Problem, state: GroupState, group: Group | None
) -> Any:
    """Every rank sends first, which must not wait for the receiver."""
    after, before = (state.rank + 1) % state.size, (state.rank - 1) % state.size
    handle = isend_tensors([x, new_tensor((0,), x.dtype, x.device)], dst=after, group=group)
    got, nothing = recv_tensors(src=before, group=group)
    handle.wait()
    return "an empty tensor arrived with elements" if nothing.numel() else got


def _send_and_recv(
    case: Case, x: torch.Tensor, problem: Problem, state: GroupState, group: Group | None
) -> Any:
    after, before = (state.rank + 1) % state.size, (state.rank - 1) % state.size
    handle = send(x, dst=after, group=group, async_op=True)
    got: Any = recv(src=before, **_options(case, group))
    result = got.wait() if isinstance(got, Handle) else got
    handle.wait()
    return result


_Call = Callable[[Case, torch.Tensor, Problem, GroupState, Group | None], Any]
_CALL_OF: dict[str, _Call] = {
    "all_to_all": _call_all_to_all,
    "all_gather": lambda case, x, _, __, group: all_gather(x, **_options(case, group)),
    "all_reduce": lambda case, x, _, __, group: all_reduce(x, op=case.op, **_options(case, group)),
    "reduce_scatter": _call_reduce_scatter,
    "broadcast": _call_broadcast,
    "gather": lambda case, x, problem, _, group: gather(
        x, dst=problem.root, **_options(case, group)
    ),
    "scatter": _call_scatter,
    "broadcast_nested": _nested,
    "isend_tensors": _tensors,
    "send and recv": _send_and_recv,
}
