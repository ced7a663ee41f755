"""Parameters cut into pieces of some rows, so that what is copied for an update stays small; pure.

Invariant: the pieces of a parameter are all of its rows, in order; an empty one has one, too.

    for part in parts_of({"experts.down_proj": (128, 2048, 768)}, uncut=()):
        rows = [piece.of(tensors[piece.name]) for piece in part]
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from moe_train.slices import SLICE_ELEMENTS, slices_of

# Kernels of CPUs compute the last few elements of a tensor by other instructions, with other bits:
# a piece ends where its parameter does, or at a multiple of this.
_WHOLE = 64


class Piece(NamedTuple):
    """Rows of dim 0 of a parameter, from `first` on up to `end`; None: all of it."""

    name: str
    first: int = 0
    end: int | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """These rows of what is shaped as the parameter: a view."""
        return tensor if self.end is None else tensor[self.first : self.end]


def parts_of(
    shapes: Mapping[str, Sequence[int]], uncut: Collection[str], limit: int = SLICE_ELEMENTS
) -> list[list[Piece]]:
    """Pieces that are updated together.

    Args:
        shapes: of the parameters, by name.
        uncut: parameters that stay whole.
        limit: elements from which on a part is full; a piece has at most a quarter of them, unless
            the fewest rows that make whole vectors have more.
    """
    pieces = [
        piece
        for name, shape in shapes.items()
        for piece in ([Piece(name)] if name in uncut else _pieces(name, shape, limit // 4))
    ]
    sizes = [_numel(piece, shapes[piece.name]) for piece in pieces]
    return [pieces[part] for part in slices_of(sizes, limit)]


def _pieces(name: str, shape: Sequence[int], limit: int) -> list[Piece]:
    if math.prod(shape) <= limit:
        return [Piece(name)]
    numel = math.prod(shape[1:])
    step = _WHOLE // math.gcd(_WHOLE, numel)
    num_rows = max(1, limit // (numel * step)) * step
    firsts = range(0, shape[0], num_rows)
    return [Piece(name, first, min(first + num_rows, shape[0])) for first in firsts]


def _numel(piece: Piece, shape: Sequence[int]) -> int:
    if piece.end is None:
        return math.prod(shape)
    return (piece.end - piece.first) * math.prod(shape[1:])
