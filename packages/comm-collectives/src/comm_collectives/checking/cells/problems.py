"""What each rank gives to a collective in a cell of the matrix, and what it must get: no transfers.

Every rank computes the inputs of all ranks, since they are known functions, and from them its own
result, with nothing but indexing and integer arithmetic.

    problem = problem_of(Case(collective="all_gather", dtype=torch.int8, shape="uneven"), 0, 2)
    problem.x, problem.want
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from comm_collectives.base import as_bytes, dense, from_bytes, new_tensor
from comm_collectives.checking.cells.data import SCALAR, index_of, moving_rows, reduced_rows

EVEN, UNEVEN, EMPTY, ONE_EMPTY = "even", "uneven", "empty", "one empty"
STRIDED, EXPANDED, OVERLAPPING, ALIASED = "strided", "expanded", "overlapping", "aliased"
SHAPES = (EVEN, UNEVEN, EMPTY, ONE_EMPTY, STRIDED, EXPANDED, OVERLAPPING, ALIASED, SCALAR)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One cell: a collective on rows of `columns` elements of a dtype, shared out as `shape` says.

    `spoiled` makes a canary of it: "result" expects another result than the right one, "input"
    changes the input after the call. Both must be found wrong.
    """

    collective: str
    dtype: torch.dtype
    shape: str
    columns: int = 3
    op: str = ""
    is_async: bool = False
    spoiled: str = ""

    def __str__(self) -> str:
        words = [self.collective, str(self.dtype).removeprefix("torch."), self.op, self.shape]
        words.append(f"{self.columns} columns")
        words.append("async" if self.is_async else "")
        words.append(f"(canary: {self.spoiled} spoiled)" if self.spoiled else "")
        return " ".join(word for word in words if word)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What one rank has to do.

    Attributes:
        x: what it gives, contiguous; None if it gives nothing.
        want: what it must get; None for nothing.
        sent: rows of `x` for each rank, where it is cut.
        received: rows of `want` from each rank, where it is put together.
        root: the source or the destination, where there is one.
    """

    x: torch.Tensor | None
    want: torch.Tensor | None
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()
    root: int = 0


def problem_of(case: Case, rank: int, size: int) -> Problem:
    """Return what `rank` of `size` ranks has to do in a cell."""
    return _KIND_OF[case.collective.rpartition(".")[2]](case, rank, size)


def num_rows(shape: str, src: int, dst: int) -> int:
    """Rows that `src` has for `dst`."""
    if shape == UNEVEN:
        return (2 * src + 3 * dst + 1) % 4
    if shape == ONE_EMPTY:
        return 0 if 0 in (src, dst) else 1 + dst
    return 0 if shape == EMPTY else 2


def _given(case: Case, src: int, rows: int) -> torch.Tensor:
    index = index_of(case.shape, rows=rows, columns=case.columns)
    return moving_rows(case.dtype, index, src=src)


def _join(pieces: list[torch.Tensor], case: Case) -> torch.Tensor:
    rows = sum(len(piece) for piece in pieces)
    joined = new_tensor((rows, case.columns), case.dtype, torch.get_default_device())
    at = 0
    for piece in pieces:
        joined[at : at + len(piece)] = piece
        at += len(piece)
    return joined


def _exchange(case: Case, rank: int, size: int) -> Problem:
    rows = [[num_rows(case.shape, src, dst) for dst in range(size)] for src in range(size)]
    pieces = []
    for src in range(size):
        x = _given(case, src, sum(rows[src]))
        at = sum(rows[src][:rank])
        pieces.append(x[at : at + rows[src][rank]])
    return Problem(
        x=_given(case, rank, sum(rows[rank])),
        want=_join(pieces, case),
        sent=tuple(rows[rank]),
        received=tuple(row[rank] for row in rows),
    )


def _gather_all(case: Case, rank: int, size: int) -> Problem:
    rows = tuple(num_rows(case.shape, src, src) for src in range(size))
    given = [_given(case, src, n) for src, n in enumerate(rows)]
    if case.shape == SCALAR:
        whole = torch.cat([as_bytes(x) for x in given])
        return Problem(x=given[rank], want=from_bytes(whole, case.dtype, (size,)))
    want = _join(given, case)
    return Problem(x=given[rank], want=want, sent=(rows[rank],), received=rows)


def _gather_problem(case: Case, rank: int, size: int) -> Problem:
    whole, root = _gather_all(case, rank, size), size - 1
    want = whole.want if rank == root else None
    return Problem(x=whole.x, want=want, sent=whole.sent, received=whole.received, root=root)


def _scatter_problem(case: Case, rank: int, size: int) -> Problem:
    root = size - 1
    rows = tuple(num_rows(case.shape, dst, dst) for dst in range(size))
    x = _given(case, root, sum(rows))
    at = sum(rows[:rank])
    want = x if case.shape == SCALAR else dense(x[at : at + rows[rank]])
    return Problem(x=x if rank == root else None, want=want, sent=rows, root=root)


def _broadcast_problem(case: Case, rank: int, size: int) -> Problem:
    root = size - 1
    x = _given(case, root, num_rows(case.shape, root, root))
    return Problem(x=x if rank == root else None, want=x, root=root)


def _ring(case: Case, rank: int, size: int) -> Problem:
    """To the next rank, from the one before."""
    after, before = (rank + 1) % size, (rank - 1) % size
    return Problem(
        x=_given(case, rank, num_rows(case.shape, rank, after)),
        want=_given(case, before, num_rows(case.shape, before, rank)),
    )


def _reduce(case: Case, rank: int, size: int) -> Problem:
    rows = {EVEN: 4, UNEVEN: 5, EMPTY: 0}.get(case.shape, 4)
    index = index_of(case.shape, rows=rows, columns=case.columns)
    values, want = reduced_rows(case.dtype, case.op, index, size)
    return Problem(x=values[rank], want=want)


def _reduce_apart(case: Case, rank: int, size: int) -> Problem:
    kept = tuple(num_rows(case.shape, dst, dst) for dst in range(size))
    index = index_of(case.shape, rows=sum(kept), columns=case.columns)
    values, want = reduced_rows(case.dtype, case.op, index, size)
    at = sum(kept[:rank])
    return Problem(x=values[rank], want=dense(want[at : at + kept[rank]]), sent=kept)


_KIND_OF: dict[str, Callable[[Case, int, int], Problem]] = {
    "all_to_all": _exchange,
    "all_to_all_single": _exchange,
    "all_gather": _gather_all,
    "all_gather_into_tensor": _gather_all,
    "gather": _gather_problem,
    "scatter": _scatter_problem,
    "broadcast": _broadcast_problem,
    "broadcast_nested": _broadcast_problem,
    "broadcast_object_list": _broadcast_problem,
    "send and recv": _ring,
    "isend_tensors": _ring,
    "all_reduce": _reduce,
    "reduce_scatter": _reduce_apart,
    "reduce_scatter_tensor": _reduce_apart,
}
