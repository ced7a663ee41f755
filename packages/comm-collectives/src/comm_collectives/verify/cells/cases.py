"""The correctness matrix: collective x dtype x shape, each cell with an answer known beforehand.

A cell ends on each rank in a result, which is compared, or in an exception; what came of it on all
ranks together is its verdict. A check that cannot fail proves nothing, so some cells are canaries,
whose data is spoiled on purpose.

    result = run_case(case, runner)      # inside each rank, with a process group
    verdict, detail = judge([result_of_rank_0, result_of_rank_1])
"""

import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from comm_collectives.base import DTYPES
from comm_collectives.verify.cells.data import OPS, SCALAR, is_defined
from comm_collectives.verify.cells.moe_cells import MOE_COLLECTIVES, MOE_DTYPES, MOE_SHAPES
from comm_collectives.verify.cells.problems import (
    ALIASED,
    EMPTY,
    EVEN,
    EXPANDED,
    ONE_EMPTY,
    OVERLAPPING,
    STRIDED,
    UNEVEN,
    Case,
)

RIGHT, REFUSED, WRONG, FAILED = "right", "refused", "silently wrong", "failed"
ABORTED, TIMED_OUT = "aborted", "timed out"
VERDICTS = (RIGHT, REFUSED, WRONG, FAILED, ABORTED, TIMED_OUT)
SOON_S = 1.0  # within which a refusal has to be there on every rank
COLUMNS = (3, 401)  # rows that travel with a meeting, and rows that are too big for it
_MOVED = (EVEN, UNEVEN, EMPTY, ONE_EMPTY, STRIDED, EXPANDED, OVERLAPPING)
_SHAPES_OF: dict[str, tuple[str, ...]] = {
    "all_to_all": _MOVED,
    "all_gather": _MOVED,
    "reduce_scatter": _MOVED,
    "all_reduce": (EVEN, UNEVEN, EMPTY, STRIDED, EXPANDED, OVERLAPPING, SCALAR),
    "broadcast": (*_MOVED, SCALAR),
    "gather": (*_MOVED, SCALAR),
    "scatter": (*_MOVED, SCALAR),
    "broadcast_nested": (*_MOVED, SCALAR),
    "isend_tensors": (*_MOVED, SCALAR),
    "send and recv": (*_MOVED, SCALAR),
}
# Functions in torch's argument order: where what lies in given tensors can be awkward.
_TWO_LISTS = (EVEN, UNEVEN, EMPTY, ONE_EMPTY, STRIDED, EXPANDED)
_TWO_TENSORS = (EVEN, EMPTY, STRIDED, EXPANDED, ALIASED)
TORCH_SHAPES_OF: dict[str, tuple[str, ...]] = {
    "all_to_all_single": (*_TWO_LISTS, ALIASED),
    "all_to_all": _TWO_LISTS,
    "all_gather_into_tensor": _TWO_TENSORS,
    "all_gather": _TWO_LISTS,
    "reduce_scatter_tensor": _TWO_TENSORS,
    "reduce_scatter": _TWO_LISTS,
    "all_reduce": (EVEN, UNEVEN, EMPTY, STRIDED),
    "broadcast": (EVEN, EMPTY, STRIDED),
    "gather": _TWO_LISTS,
    "scatter": _TWO_LISTS,
    "send and recv": (EVEN, UNEVEN, EMPTY, STRIDED, EXPANDED),
    "broadcast_object_list": (EVEN, EMPTY, STRIDED, EXPANDED),
}
TORCH_ORDER = "torch_order"  # the module of ours that has functions of those names
_DROP_INS = (
    *("all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor"),
    *("all_reduce", "broadcast"),
)
_REDUCING = ("all_reduce", "reduce_scatter", "reduce_scatter_tensor")
_WIDE_ON = (EVEN, UNEVEN, STRIDED)
_NOT_ASYNC = ("isend_tensors",)  # it always is
_ASYNC_DTYPE = torch.bfloat16


# What torch and pickle are known to raise, and what a mistake of this package could.
_EXCEPTIONS = (
    *(RuntimeError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError),
    *(AssertionError, OSError, ImportError, Warning, pickle.PickleError),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """What came of a cell on one rank.

    Attributes:
        verdict: RIGHT, WRONG, or FAILED if it raised, until all ranks are looked at together; or
            ABORTED or TIMED_OUT if the rank did not come back.
        detail: what is wrong, or the text of the exception.
        error: the class of the exception.
        elapsed_s: from the start of the cell.
    """

    verdict: str
    detail: str = ""
    error: str = ""
    elapsed_s: float = 0.0


def canaries() -> list[Case]:
    """Return the cells that must be found wrong."""
    return [
        Case(
            collective="all_to_all",
            dtype=torch.float32,
            shape=EVEN,
            columns=columns,
            spoiled=spoiled,
        )
        for spoiled in ("result", "input")
        for columns in COLUMNS
    ]


def all_cases(
    *, dtypes: Sequence[torch.dtype] = DTYPES, columns: Sequence[int] = COLUMNS
) -> list[Case]:
    """Return every cell of this package, but for the canaries, on these dtypes."""
    cases = []
    for name, shapes in _SHAPES_OF.items():
        cases += _cells(name, shapes, dtypes, columns)
        if name not in _NOT_ASYNC:
            cases += _async_cells(name, shapes, columns)
    for name in MOE_COLLECTIVES:
        cases += _cells(name, MOE_SHAPES, [d for d in MOE_DTYPES if d in dtypes], columns)
        cases += _async_cells(name, MOE_SHAPES, columns)
    for function in _DROP_INS:
        name, shapes = f"{TORCH_ORDER}.{function}", TORCH_SHAPES_OF[function]
        cases += _cells(name, shapes, dtypes, columns)
        cases += _async_cells(name, shapes, columns)
    return cases


def torch_cases(
    *, dtypes: Sequence[torch.dtype] = DTYPES, columns: Sequence[int] = COLUMNS
) -> list[Case]:
    """Return the cells of torch.distributed itself."""
    cases = []
    for name, shapes in TORCH_SHAPES_OF.items():
        cases += _cells(f"torch.{name}", shapes, dtypes, columns)
    return cases


def _async_cells(collective: str, shapes: Sequence[str], columns: Sequence[int]) -> list[Case]:
    """Return the cells of a collective as asynchronous calls: one dtype, no ops but the sum."""
    cells = _cells(collective, shapes, [_ASYNC_DTYPE], columns)
    return [replace(cell, is_async=True) for cell in cells if cell.op in ("", OPS[0])]


def _cells(
    collective: str,
    shapes: Sequence[str],
    dtypes: Sequence[torch.dtype],
    columns: Sequence[int],
) -> list[Case]:
    """Return the cells of one collective; wide rows and the other ops come in a few shapes."""
    ops = OPS if collective.rpartition(".")[2] in _REDUCING else ("",)
    return [
        Case(collective=collective, dtype=dtype, shape=shape, columns=wide, op=op)
        for shape in shapes
        for wide in (columns if shape in _WIDE_ON else columns[:1])
        for op in (ops if shape == EVEN else ops[:1])
        for dtype in dtypes
    ]


def expected_verdict(case: Case) -> str:
    """Return what has to come of a cell."""
    if case.spoiled:
        return WRONG
    return RIGHT if not case.op or is_defined(case.dtype, case.op) else REFUSED


def run_case(run: Callable[[], str]) -> CaseResult:
    """Run a cell on this rank; `run` returns what is wrong, or ""."""
    started = time.monotonic()
    try:
        problem = run()
    except _EXCEPTIONS as error:
        return CaseResult(
            verdict=FAILED,
            detail=str(error),
            error=type(error).__name__,
            elapsed_s=time.monotonic() - started,
        )
    return CaseResult(
        verdict=WRONG if problem else RIGHT, detail=problem, elapsed_s=time.monotonic() - started
    )


def judge(results: Sequence[CaseResult]) -> tuple[str, str]:
    """Return what came of a cell on all ranks together, and the detail that says most."""
    for verdict in (ABORTED, TIMED_OUT):
        for rank, result in enumerate(results):
            if result.verdict == verdict or (verdict == TIMED_OUT and is_nameless(result)):
                return verdict, on_rank(rank, result)
    bad = [(rank, result) for rank, result in enumerate(results) if result.verdict != RIGHT]
    if not bad:
        return RIGHT, ""
    classes = {result.error for result in results}
    if classes == {""}:
        return WRONG, on_rank(*bad[0])
    latest = max(result.elapsed_s for result in results)
    if len(classes) > 1:
        return FAILED, "not alike on every rank: " + "; ".join(on_rank(*each) for each in bad)
    if latest > SOON_S:
        return FAILED, f"after {latest:.1f} s: {on_rank(*bad[0])}"
    return REFUSED, on_rank(*bad[0])


def is_nameless(result: CaseResult) -> bool:
    """Whether a rank ended in a time limit whose text names no rank."""
    text = result.detail.lower()
    return bool(result.error) and ("timed out" in text or "timeout" in text) and "rank" not in text


def on_rank(rank: int, result: CaseResult) -> str:
    """Return what came of a cell on a rank, in one line."""
    error = f"{result.error}: " if result.error else ""
    lines = result.detail.splitlines()
    return f"rank {rank}: {error}{lines[0] if lines else ''}"
