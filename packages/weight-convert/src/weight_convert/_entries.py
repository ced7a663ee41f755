"""A tensor of a file, and how many bytes a dtype takes, under the names of safetensors.

tensor_size_bytes("BF16", (2, 3))      # 12
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weight_convert.errors import WeightConvertError

# Bits of one element. The order is the library's: it writes tensors of later dtypes first, so
# that each tensor is aligned to its element size.
DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor of a file; `offset_bytes` counts from the start of the file."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    size_bytes: int


def tensor_size_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Return the bytes of a tensor.

    Raises:
        WeightConvertError: an unknown dtype, or elements that do not fill whole bytes.
    """
    if dtype not in DTYPE_BITS:
        raise WeightConvertError(f"unknown dtype {dtype!r}; known: {', '.join(DTYPE_BITS)}")
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if bits % 8:
        raise WeightConvertError(f"{dtype} {list(shape)} does not fill whole bytes ({bits} bits)")
    return bits // 8
