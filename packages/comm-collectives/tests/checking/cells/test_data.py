"""The values and layouts of the matrix: known, distinct, and every touch is noticed."""

import functools
import operator

import pytest
import torch

from comm_collectives.base.wire import DTYPES, as_bytes, dense
from comm_collectives.checking.cells.cases import KNOWN_OPS
from comm_collectives.checking.cells.data import (
    SCALAR,
    difference,
    index_of,
    is_defined,
    moving_rows,
    place,
    place_result,
    reduced_rows,
)

_OF_BITS = {"band": operator.and_, "bor": operator.or_, "bxor": operator.xor}
_LAYOUTS = ("even", "strided", "expanded", "overlapping", SCALAR)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", _LAYOUTS)
def test_placed_tensor_holds_the_values_and_is_laid_out_as_asked(
    dtype: torch.dtype, layout: str
) -> None:
    x = moving_rows(dtype, index_of(layout, rows=4, columns=3), src=1)
    view = place(x, layout).view
    assert difference(view, x) == ""
    assert view.is_contiguous() == (layout in ("even", SCALAR))
    shares = {"expanded": 3, "overlapping": 6}.get(layout)
    if shares is not None:
        places = {view[i, j].data_ptr() for i in range(4) for j in range(3)}
        assert len(places) == shares


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != torch.bool])
def test_every_rank_and_row_has_values_of_its_own(dtype: torch.dtype) -> None:
    rows = [
        bytes(as_bytes(dense(row)).tolist())
        for src in range(4)
        for row in moving_rows(dtype, index_of("even", rows=6, columns=3), src=src)
    ]
    assert len(set(rows)) == len(rows) == 24


def test_change_beside_a_strided_input_is_noticed() -> None:
    placed = place(torch.arange(6.0).view(2, 3), "strided")
    assert placed.problem() == ""
    beside = placed.view.as_strided((1,), (1,), placed.view.storage_offset() + 4)
    beside.fill_(7)
    assert "the memory of the input" in placed.problem()


def test_change_beside_a_strided_result_is_noticed_and_the_result_itself_may_change() -> None:
    room = place_result((2, 3), torch.int32, "strided")
    room.view.fill_(7)
    assert room.problem() == ""
    room.view.as_strided((1,), (1,), 3).fill_(7)
    assert "around the result" in room.problem()


def test_difference_tells_dtype_shape_and_bits_apart_but_not_one_nan_from_another() -> None:
    x = torch.tensor([1.0, torch.nan])
    assert difference(x, -x.neg()) == ""
    assert difference(torch.tensor([1.0, -torch.nan]), x) == ""
    assert "other values" in difference(torch.tensor([torch.nan, 1.0]), x)
    assert "other values" in difference(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert "float64" in difference(x.double(), x)
    assert "(2, 1)" in difference(x.view(2, 1), x)


@pytest.mark.parametrize("op", KNOWN_OPS)
@pytest.mark.parametrize("dtype", [d for d in DTYPES if not d.is_complex])
def test_reductions_agree_with_python_arithmetic(dtype: torch.dtype, op: str) -> None:
    if not is_defined(dtype, op):
        return
    values, want = reduced_rows(dtype, op, index_of("even", rows=3, columns=3), 3)
    bits = 8 * dtype.itemsize
    for got, *terms in zip(
        want.view(-1).tolist(), *(x.view(-1).tolist() for x in values), strict=True
    ):
        exact: float = sum(terms)
        if op == "avg":
            exact = sum(terms) / 3
        elif op == "product":
            exact = terms[0] * terms[1] * terms[2]
        elif op in ("min", "max"):
            exact = (min if op == "min" else max)(terms)
        elif op in _OF_BITS:
            exact = functools.reduce(_OF_BITS[op], terms)
        if dtype.is_floating_point:
            assert got == exact or (got != got and any(t != t for t in terms))
        elif dtype == torch.bool:
            assert got == bool(exact)
        else:
            assert (int(got) - int(exact)) % (1 << bits) == 0


def test_integers_reach_the_sign_and_floats_meet_a_nan() -> None:
    index = index_of("even", rows=3, columns=3)
    values, _ = reduced_rows(torch.uint64, "max", index, 2)
    assert max(values[0].view(-1).tolist()) >= 1 << 63
    values, _ = reduced_rows(torch.int8, "sum", index, 2)
    assert min(values[0].view(-1).tolist()) == -128
    _, want = reduced_rows(torch.float32, "min", index, 2)
    assert want.isnan().sum() == 1


def test_which_reductions_have_a_meaning() -> None:
    defined = {(dtype, op) for dtype in DTYPES for op in KNOWN_OPS if is_defined(dtype, op)}
    assert (torch.bool, "sum") not in defined
    assert (torch.int32, "avg") not in defined
    assert (torch.complex64, "max") not in defined
    assert not any(dtype.itemsize == 1 and dtype.is_floating_point for dtype, _ in defined)
    assert (torch.float32, "bor") not in defined
    # 4 floats, 8 integers, 3 complex dtypes and bool.
    assert len(defined) == 4 * 5 + 8 * (4 + 3) + 3 * 3 + (3 + 3)
