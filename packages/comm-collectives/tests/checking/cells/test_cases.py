"""The matrix on four real ranks: which cells there are, and how each of them ends.

On two ranks, with every dtype, the command `check` is run: see `test_cli`.
"""

import time
from random import Random

import pytest
import torch

from comm_collectives.base.wire import DTYPES
from comm_collectives.checking.cells.cases import (
    TORCH_SHAPES_OF,
    all_cases,
    canaries,
    expected_verdict,
    torch_cases,
)
from comm_collectives.checking.cells.problems import Case
from comm_collectives.checking.matrix import FEW_DTYPES, check_cells
from comm_collectives.checking.rank_side import HERE, WIRE
from comm_collectives.checking.results.results import (
    Verdict,
)
from comm_collectives.checking.table import total


def test_every_cell_ends_as_it_must_on_every_rank(capsys: pytest.CaptureFixture[str]) -> None:
    """With some dtypes; `benchmarks/comm_collectives_matrix.py` takes all of them."""
    seed = time.time_ns() % 1_000_000
    dtypes = Random(seed).sample(DTYPES, 5)
    outcomes = check_cells(4, HERE, dtypes)
    with capsys.disabled():
        print(f"\n4 ranks, seed {seed}: {total('comm_collectives', outcomes)}")
    bad = [outcome for outcome in outcomes if not outcome.is_good]
    assert [f"{outcome.order.what}: {outcome.verdict}: {outcome.detail}" for outcome in bad] == []
    assert [outcome.order.what for outcome in outcomes] == [
        *canaries(),
        *all_cases(dtypes=dtypes),
    ]


def test_cells_end_as_they_must_over_the_wire() -> None:
    outcomes = check_cells(4, WIRE, FEW_DTYPES[-2:])
    bad = [outcome for outcome in outcomes if not outcome.is_good]
    assert [f"{outcome.order.what}: {outcome.verdict}: {outcome.detail}" for outcome in bad] == []
    assert len(outcomes) > 600


def test_every_collective_meets_every_dtype_in_every_shape() -> None:
    cases = all_cases()
    assert len(set(cases)) == len(cases)
    names = {case.collective for case in cases if not case.collective.startswith("dispatch")}
    assert len(names) == 10 + 5
    for name in names:
        own = [case for case in cases if case.collective == name and not case.is_async]
        shapes = {case.shape for case in own}
        assert len(shapes) >= (3 if name.startswith("torch_order.") else 7)
        small = {(case.dtype, case.shape) for case in own if case.columns == 3}
        assert len(small) == len(DTYPES) * len(shapes)
        assert any(case.columns > 128 for case in own)
    bits = {"band", "bor", "bxor"}
    assert {case.op for case in cases} == {"", "sum", "avg", "min", "max", "product", *bits}
    ways = {case.collective for case in cases if case.collective.startswith("dispatch")}
    assert len(ways) == 9
    is_async = {case.collective for case in cases if case.is_async}
    assert (names | ways) - is_async == {"isend_tensors"}


def test_cells_in_torchs_order_are_named_after_their_functions() -> None:
    names = {case.collective for case in torch_cases()}
    assert names == {f"torch.{name}" for name in TORCH_SHAPES_OF}
    assert len(names) == 12


def test_only_reductions_without_arithmetic_are_refused_and_only_canaries_wrong() -> None:
    assert {expected_verdict(case) for case in canaries()} == {Verdict.WRONG}
    refused = [case for case in all_cases() if expected_verdict(case) == Verdict.REFUSED]
    assert {case.collective for case in refused} == {
        *("all_reduce", "reduce_scatter"),
        *("torch_order.all_reduce", "torch_order.reduce_scatter_tensor"),
    }
    assert {case.dtype for case in refused if case.op == "sum"} == {
        torch.bool,
        *(d for d in DTYPES if d.itemsize == 1 and d.is_floating_point),
    }


def test_cell_is_printed_with_all_that_it_takes_to_run_it() -> None:
    case = Case(collective="x", dtype=torch.int8, shape="even", op="sum", is_async=True)
    assert str(case) == "x int8 sum even 3 columns async"
    assert str(canaries()[0]) == ("all_to_all float32 even 3 columns (canary: result spoiled)")
