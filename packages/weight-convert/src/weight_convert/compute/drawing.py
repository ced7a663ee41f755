"""Numbers drawn at random, a row at a time, so that no limit on memory changes them.

for chunk in draw_rows(DrawRows(seed=0, std=0.02), (), torch.float32, (8, 2048), 1 << 20): ...
"""

from collections.abc import Iterator, Sequence

import torch

from weight_convert.compute.reading import TensorReader
from weight_convert.operations import DrawRows


def draw_rows(
    operation: DrawRows,
    _: Sequence[TensorReader],
    dtype: torch.dtype,
    shape: tuple[int, ...],
    __: int,
) -> Iterator[torch.Tensor]:
    """The rows of one matrix, each as often as it stands there."""
    rows, columns = shape
    generator = torch.Generator().manual_seed(operation.seed)
    for _number in range(rows // operation.copies):
        row = (torch.randn(columns, generator=generator) * operation.std).to(dtype)
        for _copy in range(operation.copies):
            yield row
