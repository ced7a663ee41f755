import pytest
import torch

from weight_convert.compute.reading import TORCH_DTYPES, bytes_of, torch_dtype
from weight_convert.errors import WeightConvertError
from weight_convert.files import tensor_size_bytes


def test_the_dtypes_have_the_sizes_of_their_torch_dtypes() -> None:
    for name, dtype in TORCH_DTYPES.items():
        assert tensor_size_bytes(name, (1,)) == dtype.itemsize


def test_a_dtype_that_torch_does_not_compute_with_is_named() -> None:
    with pytest.raises(WeightConvertError, match="blocks is F4, which cannot be computed with"):
        torch_dtype("F4", "blocks")


def test_the_bytes_of_a_tensor_are_those_in_its_memory() -> None:
    values = torch.tensor([1, 2**16 - 1], dtype=torch.uint16)
    assert bytes(bytes_of(values)) == b"\x01\x00\xff\xff"
    assert bytes(bytes_of(torch.empty(0))) == b""
