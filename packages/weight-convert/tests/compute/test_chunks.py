from collections.abc import Iterator

import pytest
import torch
from safetensors.torch import save_file

from weight_convert.compute import tensor_chunks
from weight_convert.errors import WeightConvertError
from weight_convert.files import read_catalog
from weight_convert.operations import Cast, Combine, Operation
from weight_convert.outputs import Computed, PlannedTensor
from weight_convert.staging import OpenFiles

MANY = 3


@pytest.fixture
def many_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(MANY)
    yield
    torch.set_num_threads(before)


def threads_of_chunks(folder, operation: Operation, values: torch.Tensor, dtype: str) -> list[int]:
    """torch's threads while each chunk of a tensor is at hand."""
    save_file({"a": values, "b": values.clone()}, folder / "model.safetensors")
    tensors = read_catalog(folder).tensors
    number = 2 if isinstance(operation, Combine) else 1
    computed = Computed(
        operation=operation,
        inputs=tuple(PlannedTensor.of(tensors[key]) for key in "ab"[:number]),
        key="result",
        dtype=dtype,
        shape=tuple(values.shape),
    )
    with OpenFiles([folder / "model.safetensors"]) as files:
        return [torch.get_num_threads() for _ in tensor_chunks(computed, files, most=8)]


def test_what_is_bound_by_memory_takes_one_thread_and_gives_the_others_back(
    tmp_path, many_threads
) -> None:
    linear = Combine(method="linear", weights=(0.5, 0.5))
    ties = Combine(method="ties", weights=(1.0,), densities=(0.5,))
    values = torch.randn(3, 8)
    for operation, expected in ((Cast(), 1), (linear, 1), (ties, MANY)):
        assert threads_of_chunks(tmp_path, operation, values, "F32") == [expected] * 3
        assert torch.get_num_threads() == MANY


def test_a_number_that_does_not_fit_leaves_the_threads_as_they_were(tmp_path, many_threads) -> None:
    with pytest.raises(WeightConvertError, match="too large for float16"):
        threads_of_chunks(tmp_path, Cast(), torch.full((3, 8), 1e6), "F16")
    assert torch.get_num_threads() == MANY
