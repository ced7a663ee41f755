"""The correctness matrix: collective x dtype x shape, each cell with an answer known beforehand.

Every value is a function of (source rank, destination rank, row), so data that arrives in the wrong
place is wrong data. Inputs are compared again afterwards, also what lies between the elements of a
strided view. One more cell, the canary, spoils its own data: a check that does not notice is blind.

    results = run_matrix(all_cases(2))     # inside each rank, with a process group
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from comm_collectives.alltoall import all_to_all
from comm_collectives.groups import group_state
from comm_collectives.moe import combine, dispatch
from comm_collectives.nested import broadcast_nested
from comm_collectives.p2p import isend_tensors, recv_tensors
from comm_collectives.reduction import all_reduce
from comm_collectives.wire import DTYPES, as_bytes, dense

RIGHT, WRONG, REFUSED, FAILED = "right", "wrong", "refused", "failed"
SHAPES = ("even", "uneven", "empty", "strided")
_COLUMNS = 3
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_SMALL_FLOATS = tuple(d for d in DTYPES if "float8" in str(d) or "float4" in str(d))
_NO_ARITHMETIC = (torch.bool, torch.complex32, *_SMALL_FLOATS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One cell: a collective on rows of a dtype, shared out as `shape` says."""

    collective: str
    dtype: torch.dtype
    shape: str
    spoiled: bool = False

    def __str__(self) -> str:
        mark = " (canary)" if self.spoiled else ""
        return f"{self.collective} {str(self.dtype).removeprefix('torch.')} {self.shape}{mark}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """What came of a case on one rank: RIGHT, WRONG, REFUSED (a TypeError) or FAILED, and why."""

    verdict: str
    detail: str = ""


def all_cases() -> list[Case]:
    """Return every cell, the canary first."""
    cases = [Case(collective="all_to_all", dtype=torch.float32, shape="even", spoiled=True)]
    for collective, dtypes in _DTYPES_OF.items():
        cases += [
            Case(collective=collective, dtype=dtype, shape=shape)
            for shape in SHAPES
            for dtype in dtypes
        ]
    return cases


def expected_verdict(case: Case) -> str:
    """Return what has to come of a case on every rank."""
    if case.spoiled:
        return WRONG
    no_sum = case.collective == "all_reduce" and case.dtype in _NO_ARITHMETIC
    return REFUSED if no_sum else RIGHT


def run_case(case: Case, group: dist.ProcessGroup | None = None) -> CaseResult:
    """Run one cell on this rank and compare with the answer. Collective over the group."""
    _, state = group_state(group)
    run = _RUNNER_OF[case.collective]
    try:
        problem = run(case, state.rank, state.size, group)
    except TypeError as error:
        return CaseResult(verdict=REFUSED, detail=str(error))
    except (RuntimeError, ValueError) as error:
        return CaseResult(verdict=FAILED, detail=f"{type(error).__name__}: {error}")
    return CaseResult(verdict=WRONG if problem else RIGHT, detail=problem)


def run_matrix(cases: list[Case], group: dist.ProcessGroup | None = None) -> list[CaseResult]:
    """Run cells in turn on this rank. Collective over the group."""
    return [run_case(case, group) for case in cases]


def _run_all_to_all(case: Case, rank: int, size: int, group: dist.ProcessGroup | None) -> str:
    sent = [_num_rows(case.shape, rank, dst) for dst in range(size)]
    received = [_num_rows(case.shape, src, rank) for src in range(size)]
    x = torch.cat([_bytes(case, rank, dst, n) for dst, n in enumerate(sent)])
    want = torch.cat([_bytes(case, src, rank, n) for src, n in enumerate(received)])
    view, guard = _place(x, case)
    y = all_to_all(view, input_splits=sent, group=group)
    if case.spoiled:
        want = want + 1
    return _compare(y, want.view(case.dtype)) or guard()


def _run_broadcast(case: Case, rank: int, size: int, group: dist.ProcessGroup | None) -> str:
    src = size - 1
    want = _bytes(case, src, 0, _num_rows(case.shape, src, 0))
    view, guard = _place(want, case)
    value = {"x": [view, (1.5, None)], "name": str(case)} if rank == src else None
    got = broadcast_nested(value, src=src, group=group)
    if not isinstance(got, dict) or got["name"] != str(case) or got["x"][1] != (1.5, None):
        return f"the structure arrived as {got!r}"
    return _compare(got["x"][0], want.view(case.dtype)) or (guard() if rank == src else "")


def _run_transfer(case: Case, rank: int, size: int, group: dist.ProcessGroup | None) -> str:
    """Around the ring: every rank sends first, which must not wait for the receiver."""
    after, before = (rank + 1) % size, (rank - 1) % size
    if size == 1:
        return ""
    view, guard = _place(_bytes(case, rank, after, _num_rows(case.shape, rank, after)), case)
    handle = isend_tensors([view, view[:0]], dst=after, group=group)
    got, nothing = recv_tensors(src=before, group=group)
    handle.wait()
    want = _bytes(case, before, rank, _num_rows(case.shape, before, rank))
    if nothing.numel():
        return "an empty tensor arrived with elements"
    return _compare(got, want.view(case.dtype)) or guard()


def _run_all_reduce(case: Case, rank: int, size: int, group: dist.ProcessGroup | None) -> str:
    rows = 0 if case.shape == "empty" else 4
    number = torch.arange(rows * _COLUMNS).view(rows, _COLUMNS)
    if case.dtype in _NO_ARITHMETIC:
        all_reduce(_bytes(case, rank, 0, rows).view(case.dtype), group=group)
        return "a sum came back although none is defined"
    view, guard = _place((number % 5 + rank).to(case.dtype).view(torch.uint8), case)
    total = sum((number % 5 + r for r in range(size)), torch.zeros_like(number))
    return _compare(all_reduce(view, group=group), total.to(case.dtype)) or guard()


def _run_moe(case: Case, rank: int, size: int, group: dist.ProcessGroup | None) -> str:
    """Experts that do nothing: each token comes back as its weights' sum times itself, exactly."""
    tokens = {"even": 6, "uneven": 5 * rank, "empty": 0, "strided": 4}[case.shape]
    num_experts, choices = 2 * size, 2
    x = (torch.arange(tokens * _COLUMNS).view(tokens, _COLUMNS) % 7 + rank).to(case.dtype)
    number = torch.arange(tokens * choices).view(tokens, choices)
    # Uneven: everything goes to the last expert.
    idx = (number * 3 + rank) % num_experts
    if case.shape == "uneven":
        idx = torch.full_like(idx, num_experts - 1)
    weights = (number % 3).to(case.dtype) / 2
    view, guard = _place(x.view(torch.uint8), case)
    sent = dispatch(
        view, idx, weights, num_experts=num_experts, group=group, expert_alignment=1 + rank % 2
    )
    out = combine(sent.x * sent.topk_weights[:, None], sent.handle)
    return _compare(out, x * weights.sum(1, keepdim=True)) or guard()


def _num_rows(shape: str, src: int, dst: int) -> int:
    return {"even": 2, "uneven": (2 * src + 3 * dst) % 4, "empty": 0, "strided": 1 + dst}[shape]


def _bytes(case: Case, src: int, dst: int, rows: int) -> torch.Tensor:
    """Rows of the case's dtype as bytes [rows, columns * itemsize]; a bool is a byte of 0 or 1."""
    width = _COLUMNS * case.dtype.itemsize
    number = torch.arange(rows * width).view(rows, width) * 5 + 31 * src + 67 * dst
    return (number % (2 if case.dtype == torch.bool else 251)).to(torch.uint8)


def _place(flat: torch.Tensor, case: Case) -> tuple[torch.Tensor, Callable[[], str]]:
    """Return the rows as a tensor of the dtype (a strided view if asked) and a check that it and
    its surroundings are as they were."""
    x = flat.view(case.dtype)
    if case.shape != "strided":
        before = flat.clone()
        return x, lambda: _compare(flat, before, "the input")
    frame = torch.ones(3 * flat.shape[0], 2 * flat.shape[1], dtype=torch.uint8)
    frame[::3, : flat.shape[1]] = flat
    view = frame.view(case.dtype)[::3, : x.shape[1]]
    snapshot = frame.clone()
    return view, lambda: _compare(frame, snapshot, "the memory around the input")


def _compare(got: torch.Tensor, want: torch.Tensor, what: str = "the result") -> str:
    if got.dtype != want.dtype or got.shape != want.shape:
        return f"{what} is {tuple(got.shape)} {got.dtype}, not {tuple(want.shape)} {want.dtype}"
    if not torch.equal(as_bytes(dense(got)), as_bytes(dense(want))):
        return f"{what} holds other values than it should"
    return ""


_Runner = Callable[[Case, int, int, dist.ProcessGroup | None], str]
_RUNNER_OF: dict[str, _Runner] = {
    "all_to_all": _run_all_to_all,
    "broadcast_nested": _run_broadcast,
    "send and receive": _run_transfer,
    "all_reduce": _run_all_reduce,
    "dispatch and combine": _run_moe,
}
_DTYPES_OF: dict[str, tuple[torch.dtype, ...]] = {
    "all_to_all": DTYPES,
    "broadcast_nested": DTYPES,
    "send and receive": DTYPES,
    "all_reduce": DTYPES,
    "dispatch and combine": _FLOATS,
}
