"""The cells of the matrix as calls in torch's argument order, which write into given tensors.

For raw torch.distributed, to count what is broken there, and for this package's functions of the
same names, which have to get the same calls right: into strided results and shared memory too.

    run_torch_order(case, torch.distributed)      # "" or what is wrong; collective
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from comm_collectives.base import as_bytes, dense
from comm_collectives.checking.cells.cases import KNOWN_OPS
from comm_collectives.checking.cells.data import Placed, difference, place, place_result
from comm_collectives.checking.cells.ours import compare
from comm_collectives.checking.cells.problems import ALIASED, Case, Problem, problem_of

_OPS = {name: getattr(dist.ReduceOp, name.upper()) for name in KNOWN_OPS}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cell:
    """One cell on this rank. `ops` has the functions, torch.distributed or what replaces it."""

    case: Case
    problem: Problem
    ops: Any
    rank: int
    size: int

    def buffers(self) -> tuple[Placed, Placed]:
        """Return the input and room for the result, laid out as the case says."""
        x, want = self.problem.x, self.problem.want
        x = torch.empty(0, 1, dtype=self.case.dtype) if x is None else x
        want = x[:0] if want is None else want
        if self.case.shape == ALIASED:
            return _overlapping(x, want)
        layout = self.case.shape
        return place(x, layout), place_result(tuple(want.shape), want.dtype, layout)

    def check(self, given: Placed, result: Placed) -> str:
        """Compare the result, and what must not have changed."""
        want = self.problem.want
        got = None if want is None else result.view
        return compare(self.case, got, want) or result.problem() or given.problem()

    def call(self, name: str, *arguments: Any, **options: Any) -> None:
        """Call one of the functions, and wait for it."""
        if self.case.is_async:
            options["async_op"] = True
        work = getattr(self.ops, name)(*arguments, **options)
        if hasattr(work, "wait"):
            work.wait()


def run_torch_order(case: Case, ops: Any) -> str:
    """Run one cell on this rank in the default group; return what is wrong, or "".

    Collective. Whatever `ops` raises is raised.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    problem = problem_of(case, rank, size)
    cell = _Cell(case=case, problem=problem, ops=ops, rank=rank, size=size)
    return _RUN_OF.get(function_of(case), _moves)(cell)


def function_of(case: Case) -> str:
    """Return the name of the function that a cell is about, with the kind of its arguments."""
    return case.collective.partition(".")[2]


def _overlapping(x: torch.Tensor, want: torch.Tensor) -> tuple[Placed, Placed]:
    """Lay the result over the last row of the input. The rows before it stay as they are."""
    rows, columns = x.shape
    kept = max(rows - 1, 0)
    memory = torch.zeros(kept + max(len(want), 1), columns * x.dtype.itemsize, dtype=torch.uint8)
    memory[:rows] = as_bytes(dense(x)).view(rows, -1)
    before = memory[:kept].clone()
    given = memory.view(x.dtype)[:rows]
    result = memory.view(x.dtype)[kept : kept + len(want)]
    return (
        Placed(
            view=given, problem=lambda: difference(memory[:kept], before, "the rest of the input")
        ),
        Placed(view=result, problem=lambda: ""),
    )


def _cut(x: torch.Tensor, rows: Sequence[int]) -> list[torch.Tensor]:
    return list(x.split(list(rows)))


def _arguments(cell: _Cell, name: str, given: torch.Tensor, result: torch.Tensor) -> list[Any]:
    """Return what a function takes that moves one tensor, or a list, into another."""
    problem, is_root = cell.problem, cell.rank == cell.problem.root
    sources, targets = partial(_cut, given, problem.sent), partial(_cut, result, problem.received)
    made: dict[str, Callable[[], list[Any]]] = {
        "all_to_all_single": lambda: [result, given, list(problem.received), list(problem.sent)],
        "all_to_all": lambda: [targets(), sources()],
        "all_gather_into_tensor": lambda: [result, given],
        "all_gather": lambda: [targets(), given],
        "reduce_scatter_tensor": lambda: [result, given, _OPS[cell.case.op]],
        "reduce_scatter": lambda: [result, sources(), _OPS[cell.case.op]],
        "gather": lambda: [given, targets() if is_root else None, problem.root],
        "scatter": lambda: [result, sources() if is_root else None, problem.root],
    }
    return made[name]()


def _moves(cell: _Cell) -> str:
    given, result = cell.buffers()
    name = function_of(cell.case)
    arguments = _arguments(cell, name, given.view, result.view)
    cell.call(name, *arguments)
    return cell.check(given, result)


def _in_place(cell: _Cell) -> str:
    """A tensor that a call overwrites holds what the rank gives; its surroundings are watched."""
    x, want, name = cell.problem.x, cell.problem.want, function_of(cell.case)
    if want is None:
        return "there is nothing to get"
    placed = place_result(tuple(want.shape), want.dtype, cell.case.shape)
    if x is not None:
        placed.view.copy_(x)
    cell.call(name, placed.view, _OPS[cell.case.op] if cell.case.op else cell.problem.root)
    return compare(cell.case, placed.view, want) or placed.problem()


def _send_and_recv(cell: _Cell) -> str:
    """Even ranks send first, odd ones receive first."""
    given, result = cell.buffers()
    after, before = (cell.rank + 1) % cell.size, (cell.rank - 1) % cell.size
    for is_sending in (cell.rank % 2 == 0, cell.rank % 2 == 1):
        if is_sending:
            cell.call("send", given.view, dst=after)
        else:
            cell.call("recv", result.view, src=before)
    return cell.check(given, result)


def _broadcast_object_list(cell: _Cell) -> str:
    x, want = cell.problem.x, cell.problem.want
    placed = None if x is None else place(x, cell.case.shape)
    value = {"x": [None if placed is None else placed.view, (1.5, None)], "name": str(cell.case)}
    box = [value if placed is not None else None]
    cell.ops.broadcast_object_list(box, src=cell.problem.root)
    got: Any = box[0]
    if not isinstance(got, dict) or got["name"] != str(cell.case) or got["x"][1] != (1.5, None):
        return f"the structure arrived as {got!r}"
    return compare(cell.case, got["x"][0], want) or ("" if placed is None else placed.problem())


_RUN_OF: dict[str, Callable[[_Cell], str]] = {
    "all_reduce": _in_place,
    "broadcast": _in_place,
    "send and recv": _send_and_recv,
    "broadcast_object_list": _broadcast_object_list,
}
