"""What travels ahead of tensors: a few int64 words, and no pickle that could run code.

Layout: magic, flags, number of tensors; then per tensor its dtype number, the kind of device it
travels on, its number of dims and its shape.

    header = TransferHeader.describe([x], travels=["cpu"])
    assert TransferHeader.unpack(header.pack()) == header
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag
from functools import lru_cache

import torch

from comm_collectives.base import DTYPES, dtype_code

_MAGIC = 0x6D6F65_636F6D6D  # guards against reading another program's message as a header
_WORD = struct.Struct("<q")
_KINDS = ("cpu", "cuda", "xpu", "mtia", "npu", "hpu", "mps")


class TransferFlag(IntFlag):
    """What a header says beside what travels."""

    WANTS_GRADIENT = 1  # the sender waits for a gradient of what it sends
    BACKWARD_FAILED = 2  # in place of a gradient that will not come


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferHeader:
    """Dtype, shape and kind of device of each tensor of a transfer, and flags."""

    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]
    travels: tuple[str, ...]
    flags: int = 0

    @classmethod
    def describe(
        cls, tensors: Sequence[torch.Tensor], travels: Sequence[str], flags: int = 0
    ) -> "TransferHeader":
        """Describe tensors that travel on the given kinds of device."""
        return cls(
            dtypes=tuple([t.dtype for t in tensors]),
            shapes=tuple([tuple(t.shape) for t in tensors]),
            travels=tuple(travels),
            flags=flags,
        )

    def pack(self) -> bytes:
        """Return the header as bytes."""
        return _packed(self)

    @staticmethod
    def unpack(data: bytes) -> "TransferHeader | None":
        """Read what `pack` returned; None if it is something else."""
        return _unpacked(data)

    def __str__(self) -> str:
        kinds = zip(self.dtypes, self.shapes, strict=True)
        return ", ".join(f"{str(d).removeprefix('torch.')}{list(s)}" for d, s in kinds)


# Most transfers of a pipeline are alike.
@lru_cache(maxsize=256)
def _packed(header: TransferHeader) -> bytes:
    words = [_MAGIC, header.flags, len(header.dtypes)]
    for dtype, shape, kind in zip(header.dtypes, header.shapes, header.travels, strict=True):
        words += [dtype_code(dtype), _KINDS.index(kind), len(shape), *shape]
    return struct.pack(f"<{len(words)}q", *words)


@lru_cache(maxsize=256)
def _unpacked(data: bytes) -> TransferHeader | None:
    if data[: _WORD.size] != _WORD.pack(_MAGIC):
        return None
    words = iter([word for (word,) in _WORD.iter_unpack(data)][1:])
    flags, count = next(words), next(words)
    dtypes, shapes, travels = [], [], []
    for _ in range(count):
        dtypes.append(DTYPES[next(words)])
        travels.append(_KINDS[next(words)])
        shapes.append(tuple([next(words) for _ in range(next(words))]))
    return TransferHeader(
        dtypes=tuple(dtypes), shapes=tuple(shapes), travels=tuple(travels), flags=flags
    )
