"""Ranges of source tensors as torch tensors, and torch tensors as bytes.

    source = TensorReader(planned, files)
    source.read(0, 1024)      # the first 1024 elements, flat, in the tensor's dtype

Bytes of a computed tensor are read by `pread` into memory of this process, which is all that a
range ever costs; nothing is mapped, so what a chunk needs is known.
"""

import ctypes
import os
from collections.abc import Mapping
from math import prod

import torch

from weight_convert.errors import CorruptFileError, WeightConvertError
from weight_convert.files import tensor_size_bytes
from weight_convert.outputs import PlannedTensor
from weight_convert.staging import OpenFiles

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
}


def torch_dtype(name: str, key: str) -> torch.dtype:
    """The torch dtype of a safetensors dtype.

    Raises:
        WeightConvertError: torch computes nothing with it.
    """
    if name not in TORCH_DTYPES:
        raise WeightConvertError(
            f"{key} is {name}, which cannot be computed with; known: {', '.join(TORCH_DTYPES)}"
        )
    return TORCH_DTYPES[name]


class TensorReader:
    """Reads ranges of one tensor of the source."""

    def __init__(self, tensor: PlannedTensor, files: OpenFiles) -> None:
        self.key = tensor.key
        self.shape = tensor.shape
        self.num_elements = prod(tensor.shape)
        self.dtype = torch_dtype(tensor.dtype, tensor.key)
        self._tensor = tensor
        self._files = files
        self._memory = bytearray()

    @property
    def num_columns(self) -> int:
        """Elements of the last dim; 1 without dims."""
        return self.shape[-1] if self.shape else 1

    def read(self, begin: int, count: int) -> torch.Tensor:
        """`count` elements from `begin` on, flat and in memory of their own."""
        if not count:
            return torch.empty(0, dtype=self.dtype)
        size = tensor_size_bytes(self._tensor.dtype, (1,))
        memory = bytearray(count * size)
        self._fill(memoryview(memory), begin * size)
        return torch.frombuffer(memory, dtype=self.dtype)

    def read_over(self, begin: int, count: int) -> torch.Tensor:
        """The same in memory of this reader: valid until it is asked again."""
        if not count:
            return torch.empty(0, dtype=self.dtype)
        size_bytes = count * self.dtype.itemsize
        if len(self._memory) < size_bytes:
            self._memory = bytearray(size_bytes)
        self._fill(memoryview(self._memory)[:size_bytes], begin * self.dtype.itemsize)
        return torch.frombuffer(self._memory, dtype=self.dtype, count=count)

    def _fill(self, rest: memoryview, begin: int) -> None:
        """Read the bytes from `begin` on until `rest` is full."""
        for piece in self._tensor.cut(begin, len(rest)):
            _read_into(
                self._files.fd(piece.file), rest[: piece.size_bytes], piece.offset_bytes, self.key
            )
            rest = rest[piece.size_bytes :]

    def whole(self) -> torch.Tensor:
        """All of a tensor that is known to be small, such as block scales."""
        return self.read(0, self.num_elements).reshape(self.shape)


def _read_into(fd: int, target: memoryview, offset: int, key: str) -> None:
    while target:
        count = os.preadv(fd, [target], offset)
        if not count:
            raise CorruptFileError(f"the file of {key} became shorter while it was read")
        target, offset = target[count:], offset + count


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor, which must outlive the view; no numpy is needed."""
    size_bytes = tensor.numel() * tensor.element_size()
    if not size_bytes:
        return memoryview(b"")
    return memoryview((ctypes.c_char * size_bytes).from_address(tensor.data_ptr())).cast("B")
