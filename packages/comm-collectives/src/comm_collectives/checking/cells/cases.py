"""The correctness matrix: collective x dtype x shape, each cell with an answer known beforehand.

A check that cannot fail proves nothing, so some cells are canaries, whose data is spoiled on
purpose.

    cells = [*canaries(), *all_cases(dtypes=[torch.float32])]
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from comm_collectives.base import DTYPES
from comm_collectives.checking.cells.data import BITWISE, SCALAR, is_defined
from comm_collectives.checking.cells.moe_cells import MOE_COLLECTIVES, MOE_DTYPES, MOE_SHAPES
from comm_collectives.checking.cells.problems import (
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
from comm_collectives.checking.results import Verdict

KNOWN_OPS = ("sum", "avg", "min", "max", "product", *BITWISE)
COLUMNS = (3, 401)  # rows that travel with a control exchange, and rows that are too big for it
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
_SINGLE = ("all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor")
_DROP_INS = (*_SINGLE, "all_reduce", "broadcast")
_REDUCING = ("all_reduce", "reduce_scatter", "reduce_scatter_tensor")
_WIDE_ON = (EVEN, UNEVEN, STRIDED)
_NOT_ASYNC = ("isend_tensors",)  # it always is
_ASYNC_DTYPE = torch.bfloat16


def canaries() -> list[Case]:
    """Return the cells that must be found wrong."""
    cell = Case(collective="all_to_all", dtype=torch.float32, shape=EVEN)
    return [
        replace(cell, columns=columns, spoiled=spoiled)
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
    return [replace(cell, is_async=True) for cell in cells if cell.op in ("", KNOWN_OPS[0])]


def _cells(
    collective: str, shapes: Sequence[str], dtypes: Sequence[torch.dtype], columns: Sequence[int]
) -> list[Case]:
    """Return the cells of one collective; wide rows and the other ops come in a few shapes."""
    ops = KNOWN_OPS if collective.rpartition(".")[2] in _REDUCING else ("",)
    return [
        Case(collective=collective, dtype=dtype, shape=shape, columns=wide, op=op)
        for shape in shapes
        for wide in (columns if shape in _WIDE_ON else columns[:1])
        for op in (ops if shape == EVEN else ops[:1])
        for dtype in dtypes
    ]


def expected_verdict(case: Case) -> Verdict:
    """Return what has to come of a cell."""
    if case.spoiled:
        return Verdict.WRONG
    is_drop_in = case.collective == f"{TORCH_ORDER}.all_reduce"
    if is_drop_in and case.op == "product" and case.dtype.is_complex:
        return Verdict.REFUSED  # as torch's own
    return Verdict.RIGHT if not case.op or is_defined(case.dtype, case.op) else Verdict.REFUSED
