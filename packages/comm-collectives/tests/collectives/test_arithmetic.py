"""What reductions compute, against torch on the same rows."""

import random

import pytest
import torch

from comm_collectives.base.wire import DTYPES, as_bytes
from comm_collectives.collectives.arithmetic import (
    OPS,
    check_op,
    from_backend,
    gradient_factors,
    is_native,
    reduce_into,
    reduce_rows,
    to_backend,
)

_TORCHS = {"min": torch.amin, "max": torch.amax, "product": torch.prod}


def _is_defined(dtype: torch.dtype, op: str) -> bool:
    try:
        check_op(dtype, op)
    except TypeError:
        return False
    return True


def test_ops_are_defined_for_dtypes_with_that_arithmetic() -> None:
    defined = {op: {d for d in DTYPES if _is_defined(d, op)} for op in OPS}
    floats = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
    complexes = {torch.complex32, torch.complex64, torch.complex128}
    assert defined["avg"] == floats | complexes
    integers = {d for d in DTYPES if d not in floats | complexes and d.itemsize and "int" in str(d)}
    assert len(integers) == 8
    assert defined["sum"] == floats | complexes | integers
    assert defined["product"] == floats | complexes | integers | {torch.bool}
    assert defined["min"] == defined["max"] == floats | integers | {torch.bool}


def test_unknown_op_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="choose one of sum, avg, min, max, product"):
        check_op(torch.float32, "mean")


def test_way_to_the_backend_and_back_keeps_every_bit() -> None:
    generator = torch.Generator().manual_seed(3)
    for dtype in DTYPES:
        for op in OPS:
            if not (_is_defined(dtype, op) and is_native(dtype, op)):
                continue
            size = (40 * dtype.itemsize,)
            top = 2 if dtype == torch.bool else 120  # no NaN, whose bits may change
            x = torch.randint(0, top, size, generator=generator, dtype=torch.uint8).view(dtype)
            work = to_backend(x, op)
            assert work.data_ptr() != x.data_ptr()
            back = from_backend(work, dtype, op)
            assert torch.equal(back.view(torch.uint8), x.view(torch.uint8)), (dtype, op)


def test_order_survives_the_way_of_unsigned_integers() -> None:
    x = torch.tensor([0, 1, 2**63 - 1, 2**63, 2**64 - 1], dtype=torch.uint64)
    assert to_backend(x, "max").diff().gt(0).all()


def test_extremes_of_floats_are_not_left_to_backends() -> None:
    assert not is_native(torch.float32, "max")
    assert is_native(torch.float32, "sum")
    assert is_native(torch.int32, "max")
    assert not is_native(torch.complex64, "product")


def test_rows_are_reduced_in_order_and_rounded_once() -> None:
    rows = torch.tensor([[1e30], [1.0], [-1e30]])
    assert reduce_rows(rows, "sum").tolist() == [0]
    assert reduce_rows(rows[[0, 2, 1]], "sum").tolist() == [1]
    small = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    assert reduce_rows(small, "sum").tolist() == [258]
    assert reduce_rows(small, "avg").tolist() == [86]
    eighths = torch.full((5, 2), 1.25).to(torch.float8_e4m3fn)
    assert reduce_rows(eighths, "sum").float().tolist() == [6, 6]  # of 6.25, rounded to even


def test_rows_reduced_into_one_of_the_first_two_have_the_same_bits() -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    draw = torch.Generator().manual_seed(seed)
    dtypes = [d for d in DTYPES if d != torch.complex32]  # which torch warns of
    for dtype, op in [(d, o) for d in dtypes for o in OPS if _is_defined(d, o)]:
        for size in (1, 2, 3, 5):
            rows = [(torch.randn(40, generator=draw) * 9).to(dtype) for _ in range(size)]
            want = reduce_rows(torch.stack(rows), op)
            out = rows[seed % 2 if size == 2 else 0]
            reduce_into(out, rows if size < 3 else [out.clone(), *rows[1:]], op)
            assert torch.equal(as_bytes(out), as_bytes(want)), (dtype, op, size)


@pytest.mark.parametrize("op", sorted(_TORCHS))
def test_factors_are_torchs_gradients(op: str) -> None:
    generator = torch.Generator().manual_seed(5)
    for dtype in (torch.float64, torch.complex128):
        if dtype.is_complex and op != "product":
            continue
        rows = torch.randint(-2, 3, (4, 60), generator=generator).to(dtype)  # ties and zeros
        x = rows.clone().requires_grad_()
        grad = torch.randn(60, dtype=dtype, generator=generator)
        _TORCHS[op](x, 0).backward(grad)
        assert torch.allclose(gradient_factors(rows, op) * grad, x.grad, rtol=1e-14)


def test_factors_of_products_are_exact_where_a_division_is_not() -> None:
    # The product of the first column is 0, and that of the second rounds to 0.
    rows = torch.tensor([[0.0, 2.0**-100], [0.0, 2.0**-100], [3.0, 2.0**80]])
    assert gradient_factors(rows, "product").tolist() == [[0, 2**-20], [0, 2**-20], [0, 0]]
    one_zero = torch.tensor([[0.0], [5.0], [7.0]])
    assert gradient_factors(one_zero, "product").tolist() == [[35], [0], [0]]
