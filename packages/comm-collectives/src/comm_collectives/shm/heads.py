"""What a rank says of its call in its first shared step, and what all ranks make of it.

Every rank sees the same heads in the same step, so a difference is an error on every rank, before
any data has been used, and the next call finds the ranks in step.

    head = Head("all_reduce", torch.float32, "sum", x.nbytes)
    check_heads(head, channel.heads(HEAD_BYTES), names)
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch

from comm_collectives.base import DTYPES
from comm_collectives.errors import MismatchError

_WORDS = struct.Struct("<5q")
HEAD_BYTES = _WORDS.size
REFUSED = "refused"
_OPERATIONS = (
    "all_reduce",
    "all_to_all",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "gather",
    "scatter",
    "barrier",
    "reduce",
    "all_reduce of sparse tensors",
    "allreduce_coalesced",
    "allgather_coalesced",
    "all_gather_single_coalesced",
    "reduce_scatter_single_coalesced",
    REFUSED,
)
_NO_DTYPE = -1
# gate: clone - unlike in dtype_code, a dtype without a number is no mistake here
_CODE_OF = {dtype: code for code, dtype in enumerate(DTYPES)}
_REDUCTIONS = ("", "sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")


class Head(NamedTuple):
    """One rank's call: operation, dtype, reduction or "", bytes of its tensor, root or -1."""

    operation: str
    dtype: torch.dtype | None = None
    reduction: str = ""
    num_bytes: int = 0
    root: int = -1

    def pack(self) -> bytes:
        """Return the head as `HEAD_BYTES` bytes."""
        return _WORDS.pack(
            _OPERATIONS.index(self.operation),
            _NO_DTYPE if self.dtype is None else _CODE_OF.get(self.dtype, _NO_DTYPE),
            _REDUCTIONS.index(self.reduction),
            self.num_bytes,
            self.root,
        )

    @staticmethod
    def unpack(data: bytes) -> "Head":
        """Read what `pack` wrote."""
        operation, dtype, reduction, num_bytes, root = _WORDS.unpack_from(data)
        return Head(
            _OPERATIONS[operation],
            None if dtype == _NO_DTYPE else DTYPES[dtype],
            _REDUCTIONS[reduction],
            num_bytes,
            root,
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


def check_heads(own: bytes, heads: Sequence[bytes], names: Sequence[int]) -> None:
    """Check that all ranks make the same call. `names` are the ranks' numbers for the error.

    Raises:
        MismatchError: they do not; on every rank, and every rank is named with its call.
    """
    if any(head != own for head in heads):
        raise MismatchError(
            "the ranks make different calls: "
            + "; ".join(
                f"rank {name}: {Head.unpack(head)}" for name, head in zip(names, heads, strict=True)
            )
        )
