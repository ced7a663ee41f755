import pytest
import torch

from weight_convert.compute import elementwise
from weight_convert.errors import WeightConvertError
from weight_convert.operations import Cast, Transpose


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_cast_rounds_as_torch_does(compute, monkeypatch, chunk, dtype) -> None:
    monkeypatch.setattr(elementwise, "CHUNK_ELEMENTS", chunk)
    source = torch.randn(5, 3, dtype=torch.float64)
    assert torch.equal(compute(Cast(), [source], dtype, (5, 3)), source.to(dtype))


def test_a_number_that_a_narrow_dtype_cannot_hold_is_named() -> None:
    values = torch.tensor([1.0, 1e5, -3.0])
    with pytest.raises(WeightConvertError, match=r"w holds 100000, too large for float16"):
        elementwise.rounded(values, torch.float16, "w")
    endless = torch.tensor([float("inf"), float("nan")])
    assert elementwise.rounded(endless, torch.float16, "w").isinf().tolist() == [True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_float64_that_no_narrower_dtype_can_hold_is_named(dtype) -> None:
    values = torch.tensor([1.0, float("-inf"), -1e300], dtype=torch.float64)
    with pytest.raises(WeightConvertError, match=r"w holds 1e\+300, too large .* leave its dtype"):
        elementwise.rounded(values, dtype, "w")
    assert torch.equal(elementwise.rounded(values[:2], dtype, "w"), values[:2].to(dtype))


@pytest.mark.parametrize("band_bytes", [1, 40, 24 << 20])
@pytest.mark.parametrize("shape", [(5, 3), (1, 7), (2, 4, 6), (3, 0, 2), (2, 2, 3, 5)])
def test_a_transpose_exchanges_the_last_two_dims(compute, monkeypatch, band_bytes, shape) -> None:
    monkeypatch.setattr(elementwise, "_BAND_BYTES", band_bytes)
    monkeypatch.setattr(elementwise, "CHUNK_ELEMENTS", 8)
    source = torch.randint(-9, 9, shape, dtype=torch.int16)
    expected = source.transpose(-1, -2)
    assert torch.equal(compute(Transpose(), [source], torch.int16, expected.shape), expected)
