"""Runs one operation on tensors that stand in a real file."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from weight_convert.compute import tensor_chunks
from weight_convert.compute.reading import TORCH_DTYPES
from weight_convert.files import read_catalog
from weight_convert.operations import Operation
from weight_convert.outputs import Computed, PlannedTensor
from weight_convert.staging import OpenFiles

Compute = Callable[..., torch.Tensor]
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


@pytest.fixture
def compute(tmp_path: Path) -> Compute:
    """`compute(operation, inputs, dtype, shape)` gives the tensor that the engine would write."""

    def run(
        operation: Operation,
        inputs: Sequence[torch.Tensor],
        dtype: torch.dtype,
        shape: Sequence[int],
    ) -> torch.Tensor:
        tensors = {f"{number:03d}": tensor for number, tensor in enumerate(inputs)}
        save_file(tensors, tmp_path / "model.safetensors")
        catalog = read_catalog(tmp_path)
        computed = Computed(
            operation=operation,
            inputs=tuple(PlannedTensor.of(catalog.tensors[key]) for key in tensors),
            key="result",
            dtype=_NAMES[dtype],
            shape=tuple(shape),
        )
        with OpenFiles([tmp_path / "model.safetensors"]) as files:
            content = bytearray(b"".join(bytes(part) for part in tensor_chunks(computed, files)))
        if not content:
            return torch.empty(*shape, dtype=dtype)
        return torch.frombuffer(content, dtype=dtype).reshape(*shape)

    return run
