"""Numbers of two tensors in chunks, whatever their dtypes: bfloat16 against float32, for example.

first_number(a, b, files_a, files_b)      # None: all equal
"""

import torch

from weight_convert.compute import TensorReader
from weight_convert.outputs import PlannedTensor
from weight_convert.staging import OpenFiles

_CHUNK_ELEMENTS = 1 << 20


def first_number(
    a: PlannedTensor, b: PlannedTensor, files_a: OpenFiles, files_b: OpenFiles
) -> str | None:
    """Where the numbers of two tensors of one shape first differ; NaN equals NaN."""
    left, right = TensorReader(a, files_a), TensorReader(b, files_b)
    for begin in range(0, left.num_elements, _CHUNK_ELEMENTS):
        count = min(_CHUNK_ELEMENTS, left.num_elements - begin)
        found = unequal(left.read(begin, count), right.read(begin, count))
        if found is not None:
            return f"numbers differ from element {begin + found} of {left.num_elements} on"
    return None


def unequal(a: torch.Tensor, b: torch.Tensor) -> int | None:
    """The first element, counted flat, at which two tensors of one shape are not the same number.

    Dtypes may differ; they are compared as float64, in which float dtypes are exact.
    """
    if a.dtype == b.dtype:
        same = (a == b) | (a.isnan() & b.isnan()) if a.is_floating_point() else a == b
    else:
        wide_a, wide_b = a.double(), b.double()
        same = (wide_a == wide_b) | (wide_a.isnan() & wide_b.isnan())
    differing = (~same.reshape(-1)).nonzero()
    return int(differing[0]) if len(differing) else None
