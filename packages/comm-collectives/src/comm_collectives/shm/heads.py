"""What a rank says of its call ahead of the data, which all ranks compare.

head = Head("all_reduce", torch.float32, "sum", x.nbytes)
"""

import struct
from typing import NamedTuple

import torch

from comm_collectives.base import DTYPES

_WORDS = struct.Struct("<32s4q")
_NO_DTYPE = -1
# gate: clone - unlike in dtype_code, a dtype without a number is no mistake here
_CODE_OF = {dtype: code for code, dtype in enumerate(DTYPES)}
_REDUCTIONS = ("", "sum", "avg", "product", "min", "max", "band", "bor", "bxor")
REFUSED = "refused"


class Head(NamedTuple):
    """One rank's call: operation, dtype, reduction or "", bytes of its tensor, root or -1."""

    operation: str
    dtype: torch.dtype | None = None
    reduction: str = ""
    num_bytes: int = 0
    root: int = -1

    def pack(self) -> bytes:
        """Return what differs between calls that differ."""
        return _WORDS.pack(
            self.operation.encode(),
            _NO_DTYPE if self.dtype is None else _CODE_OF.get(self.dtype, _NO_DTYPE),
            _REDUCTIONS.index(self.reduction),
            self.num_bytes,
            self.root,
        )

    def __str__(self) -> str:
        if self.operation == REFUSED:
            return "refused its own arguments"
        parts = [f"{self.num_bytes} bytes"]
        if self.dtype is not None:
            parts.append(str(self.dtype).removeprefix("torch."))
        if self.reduction:
            parts.append(f"op={self.reduction}")
        if self.root >= 0:
            parts.append(f"root={self.root}")
        return f"{self.operation}({', '.join(parts)})"
