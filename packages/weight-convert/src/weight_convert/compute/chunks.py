"""The bytes of a computed tensor, chunk by chunk.

    for chunk in tensor_chunks(computed, files):
        os.write(fd, chunk)

Invariant: the chunks together are the tensor's bytes in its dtype and shape, neither more nor less;
one is valid until the next is asked for. What a chunk needs does not grow with the tensor.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from weight_convert.compute import drawing, elementwise, fp8, lowrank, merging, mx
from weight_convert.compute.reading import TensorReader, bytes_of, torch_dtype
from weight_convert.errors import WeightConvertError
from weight_convert.files import tensor_size_bytes
from weight_convert.operations import (
    AddLowRank,
    Cast,
    Combine,
    DrawRows,
    Factorise,
    FromBlocks,
    FromMx,
    Operation,
    ToBlocks,
    ToMx,
    Transpose,
)
from weight_convert.outputs import Computed
from weight_convert.staging import OpenFiles

_Kernel = Callable[
    [Any, Sequence[TensorReader], torch.dtype, tuple[int, ...], int], Iterator[torch.Tensor]
]
_KERNELS: Mapping[type[Operation], _Kernel] = {
    AddLowRank: lowrank.add_low_rank,
    Factorise: lowrank.factorise,
    Cast: elementwise.cast,
    Transpose: elementwise.transpose,
    Combine: merging.combine,
    DrawRows: drawing.draw_rows,
    FromBlocks: fp8.from_blocks,
    ToBlocks: fp8.to_blocks,
    FromMx: mx.from_mx,
    ToMx: mx.to_mx,
}
_BOUND_BY_MEMORY = (Cast, Transpose, FromBlocks, ToBlocks)
_BOUND_BY_MEMORY_METHODS = ("linear", "slerp", "model_stock", "task_arithmetic")


def tensor_chunks(
    computed: Computed, files: OpenFiles, most: int = 1 << 62
) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in order.

    Args:
        computed: what to compute; its inputs are ranges of `files`.
        files: the source's weight files.
        most: limit on the elements of a chunk, where rows are no longer.

    Raises:
        WeightConvertError: a dtype that torch does not compute with, or a result that does not fit.
        CorruptFileError: a file became shorter meanwhile.
    """
    kernel = _KERNELS[type(computed.operation)]
    dtype = torch_dtype(computed.dtype, computed.key)
    inputs = tuple(TensorReader(tensor, files) for tensor in computed.inputs)
    left = tensor_size_bytes(computed.dtype, computed.shape)
    with torch.no_grad(), _threads_for(computed.operation):
        for values in kernel(computed.operation, inputs, dtype, computed.shape, most):
            flat = values.to(dtype).contiguous()
            left -= flat.numel() * flat.element_size()
            yield bytes_of(flat)
    if left:
        raise WeightConvertError(f"{computed.key}: {-left} bytes too many were computed")


@contextmanager
def _threads_for(operation: Operation) -> Iterator[None]:
    """One torch thread for what reads and writes more than it computes.

    More threads are hardly faster there, and they wait for each other by spinning: twice the
    processor time, and thirty times of it where another program has one of the cores.
    """
    light = isinstance(operation, _BOUND_BY_MEMORY) or (
        isinstance(operation, Combine) and operation.method in _BOUND_BY_MEMORY_METHODS
    )
    before = torch.get_num_threads()
    torch.set_num_threads(1 if light else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
