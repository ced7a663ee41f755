"""The arithmetic of reductions, element by element and in rank order.

name, reduction = find_reduction(dist.ReduceOp.SUM, torch.float32)
if reduction is not None:  # else it is not defined here
    reduction(values_by_rank, out)
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import final

import torch
import torch.distributed as dist

_NO_CONTEXT = nullcontext()
ReduceOp = dist.ReduceOp | dist.ReduceOp.RedOpType

_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
_ARITHMETIC: dict[dist.ReduceOp.RedOpType, Callable[..., torch.Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
}
_BITWISE: dict[dist.ReduceOp.RedOpType, Callable[..., torch.Tensor]] = {
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}


@final
@dataclass(frozen=True, slots=True)
class Reduction:
    """One reduce operation for one kind of dtype."""

    combine: Callable[..., torch.Tensor]
    is_average: bool = False

    def __call__(self, values: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Reduce tensors into `out`, which may be the first or the second one."""
        # Tensors made in inference mode may be written to in no other; this may be another thread.
        with torch.inference_mode() if out.is_inference() else _NO_CONTEXT:
            self.combine(values[0], values[1], out=out)
            for value in values[2:]:
                self.combine(out, value, out=out)
            if self.is_average:
                out /= len(values)


def find_reduction(op: ReduceOp, dtype: torch.dtype) -> tuple[str, Reduction | None]:
    """Return what an operation is called, and its arithmetic if that is defined here."""
    kind = op.op if isinstance(op, dist.ReduceOp) else op
    return _find(kind, dtype)


@cache
def _find(kind: dist.ReduceOp.RedOpType, dtype: torch.dtype) -> tuple[str, Reduction | None]:
    name = str(kind).rpartition(".")[2].lower()
    if kind == dist.ReduceOp.AVG and dtype in _FLOATING:
        return name, Reduction(torch.add, is_average=True)
    if kind in _ARITHMETIC and dtype in (*_FLOATING, *_INTEGERS):
        return name, Reduction(_ARITHMETIC[kind])
    if kind in _BITWISE and dtype in _INTEGERS:
        return name, Reduction(_BITWISE[kind])
    return name, None
