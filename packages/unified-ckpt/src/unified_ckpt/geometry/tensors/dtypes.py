"""Names, sizes and torch dtypes of everything that a safetensors file can hold.

`shape` means torch's shape everywhere in this package. It differs from the shape in a file's header
only for packed dtypes: one element of `torch.float4_e2m1fn_x2` is one byte and holds two F4 values,
so its last dim counts double in the header.

    dtype_of("BF16").torch_dtype is torch.bfloat16
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from unified_ckpt.errors import CheckpointTypeError, CheckpointValueError


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredDtype:
    """One dtype of the safetensors format.

    `bits` is the size of one stored value. `torch_dtype` is None where torch has no such dtype;
    `itemsize_bytes` and `values_per_item` describe one torch element (0 where there is none).
    """

    name: str
    bits: int
    torch_dtype: torch.dtype | None
    itemsize_bytes: int
    values_per_item: int = 1


def _plain(name: str, torch_dtype: torch.dtype) -> StoredDtype:
    size = torch_dtype.itemsize
    return StoredDtype(name=name, bits=8 * size, torch_dtype=torch_dtype, itemsize_bytes=size)


_ALL = (
    _plain("BOOL", torch.bool),
    _plain("U8", torch.uint8),
    _plain("I8", torch.int8),
    _plain("U16", torch.uint16),
    _plain("I16", torch.int16),
    _plain("U32", torch.uint32),
    _plain("I32", torch.int32),
    _plain("U64", torch.uint64),
    _plain("I64", torch.int64),
    _plain("F16", torch.float16),
    _plain("BF16", torch.bfloat16),
    _plain("F32", torch.float32),
    _plain("F64", torch.float64),
    _plain("C64", torch.complex64),
    _plain("F8_E4M3", torch.float8_e4m3fn),
    _plain("F8_E4M3FNUZ", torch.float8_e4m3fnuz),
    _plain("F8_E5M2", torch.float8_e5m2),
    _plain("F8_E5M2FNUZ", torch.float8_e5m2fnuz),
    _plain("F8_E8M0", torch.float8_e8m0fnu),
    StoredDtype(
        name="F4", bits=4, torch_dtype=torch.float4_e2m1fn_x2, itemsize_bytes=1, values_per_item=2
    ),
    StoredDtype(name="F6_E2M3", bits=6, torch_dtype=None, itemsize_bytes=0),
    StoredDtype(name="F6_E3M2", bits=6, torch_dtype=None, itemsize_bytes=0),
)
_BY_NAME = {d.name: d for d in _ALL}
_BY_TORCH = {d.torch_dtype: d for d in _ALL if d.torch_dtype is not None}


def dtype_of(name: str) -> StoredDtype:
    """Look up a dtype by its safetensors name."""
    if name not in _BY_NAME:
        raise CheckpointValueError(f"unknown dtype {name!r}; known: {', '.join(_BY_NAME)}")
    return _BY_NAME[name]


def stored_dtype(torch_dtype: torch.dtype) -> StoredDtype:
    """Look up the safetensors dtype of a torch dtype."""
    if torch_dtype not in _BY_TORCH:
        known = ", ".join(str(d).removeprefix("torch.") for d in _BY_TORCH)
        raise CheckpointTypeError(
            f"safetensors cannot hold {torch_dtype}; view or convert it to one of {known}"
        )
    return _BY_TORCH[torch_dtype]


def header_shape(dtype: StoredDtype, shape: Sequence[int]) -> tuple[int, ...]:
    """Convert torch's shape into the shape that the file's header states."""
    if dtype.values_per_item == 1:
        return tuple(shape)
    return (*shape[:-1], shape[-1] * dtype.values_per_item)


def torch_shape(dtype: StoredDtype, shape: Sequence[int]) -> tuple[int, ...] | None:
    """Convert a header's shape into torch's; None where no torch tensor has that shape."""
    if dtype.torch_dtype is None:
        return None
    if dtype.values_per_item == 1:
        return tuple(shape)
    if not shape or shape[-1] % dtype.values_per_item:
        return None
    return (*shape[:-1], shape[-1] // dtype.values_per_item)
