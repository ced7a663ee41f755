"""A tensor of an output as byte ranges of source files, and the order of tensors.

    tensor = PlannedTensor.of(catalog.tensors["model.norm.weight"])
    tensor.pieces      # (Piece(file=0, offset_bytes=264, size_bytes=16),)

Invariant: the pieces, in order, are all bytes of the tensor.
"""

import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

from weight_convert.errors import CorruptFileError
from weight_convert.files import SourceTensor
from weight_convert.staging import OpenFiles

NaturalKey = tuple[tuple[int, str, int], ...]
Order = tuple[NaturalKey, int, int]
NO_ORDER: Order = ((), 0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A byte range of a source file; `file` indexes `Catalog.files`."""

    file: int
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTensor:
    """One tensor made of `pieces` in order.

    Attributes:
        order: sorts tensors over the files: the place of the tensor in memory that it belongs to,
            then its part, then its expert.
        ends: for each piece, the bytes up to its end; empty for one piece.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    order: Order
    ends: tuple[int, ...] = ()

    @classmethod
    def of(cls, tensor: SourceTensor) -> "PlannedTensor":
        """A source tensor as it is, without a place among the others."""
        ranges = tensor.ranges or ((tensor.file, tensor.offset_bytes, tensor.size_bytes),)
        pieces = tuple(Piece(file=f, offset_bytes=at, size_bytes=n) for f, at, n in ranges)
        return cls(
            key=tensor.key,
            dtype=tensor.dtype,
            shape=tensor.shape,
            pieces=pieces,
            order=NO_ORDER,
            ends=ends_of(pieces),
        )

    def made_of(self, pieces: Sequence[Piece]) -> "PlannedTensor":
        """The tensor with these pieces as its bytes."""
        return replace(self, pieces=tuple(pieces), ends=ends_of(pieces))

    def behind(self, num_files: int) -> "PlannedTensor":
        """The tensor where its directory's files stand behind `num_files` others."""
        pieces = tuple(replace(piece, file=piece.file + num_files) for piece in self.pieces)
        return replace(self, pieces=pieces)

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor."""
        return sum(piece.size_bytes for piece in self.pieces)

    def cut(self, begin: int, size_bytes: int) -> Iterator[Piece]:
        """The pieces of a byte range of the tensor."""
        number = bisect_right(self.ends, begin) if self.ends else 0
        while size_bytes:
            piece = self.pieces[number]
            skip = begin - (self.ends[number - 1] if number else 0)
            length = min(size_bytes, piece.size_bytes - skip)
            if length < piece.size_bytes:  # most are whole, and need no new object
                at = piece.offset_bytes + skip
                piece = Piece(file=piece.file, offset_bytes=at, size_bytes=length)
            yield piece
            begin, size_bytes, number = begin + length, size_bytes - length, number + 1

    def read(self, begin: int, size_bytes: int, files: OpenFiles) -> Iterator[bytes]:
        """Read a byte range of the tensor in full.

        Raises:
            CorruptFileError: a file became shorter meanwhile.
        """
        for piece in self.cut(begin, size_bytes):
            offset, end = piece.offset_bytes, piece.offset_bytes + piece.size_bytes
            while offset < end:
                part = os.pread(files.fd(piece.file), end - offset, offset)
                if not part:
                    raise CorruptFileError(f"the file of {self.key} became shorter meanwhile")
                yield part
                offset += len(part)


def ends_of(pieces: Sequence[Piece]) -> tuple[int, ...]:
    """For each piece, the bytes up to its end; empty for one piece."""
    ends = tuple(accumulate(piece.size_bytes for piece in pieces))
    return ends if len(ends) > 1 else ()


@lru_cache(maxsize=1024)  # the experts of a projection share one key object: time and memory
def natural_key(key: str) -> NaturalKey:
    """Return a sort key under which `layers.2` precedes `layers.10`, as in transformers."""
    return tuple(map(_natural_field, key.split(".")))


@lru_cache(maxsize=4096)  # few are distinct: shared, a plan of many tensors is a third smaller
def _natural_field(field: str) -> tuple[int, str, int]:
    stem = field.rstrip("0123456789") if len(field) < 1000 else field  # int() has a limit
    digits = field[len(stem) :]
    return (1 if stem else 0, stem, int(digits) if digits else -1)
