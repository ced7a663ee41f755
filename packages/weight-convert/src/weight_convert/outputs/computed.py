"""Tensors that are computed from others, as data: what the engine does beside copying ranges.

A computed tensor stands in a plan as a tensor of one piece of a file that nobody stored: its number
is behind those of the source's files, and the engine writes what `compute/` makes of the operation
where it would copy a range. So planning, dealing to files and dry runs need no torch.

    work = Computations(num_sources=len(catalog.files))
    tensor = work.add(Cast(), (source,), key="norm.weight", dtype="F32", shape=(8,))
    work.all[0].inputs     # (source,)

A transposed tensor may be cut before it is written: `settled` then replaces what was cut by
transposes of parts of its source.

Invariant: an extent reads a computed tensor whole; its inputs are ranges of real files.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from weight_convert.errors import WeightConvertError
from weight_convert.files import tensor_size_bytes
from weight_convert.operations import Cast, Operation, Transpose
from weight_convert.outputs.tensors import NO_ORDER, Order, Piece, PlannedTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """One tensor to compute: the operation says of what, and in which order its inputs stand."""

    operation: Operation
    inputs: tuple[PlannedTensor, ...]
    key: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(slots=True)
class Computations:
    """Collects the computed tensors of one plan whose sources are `num_sources` files."""

    num_sources: int
    all: list[Computed] = field(default_factory=list)

    def add(
        self,
        operation: Operation,
        inputs: Iterable[PlannedTensor],
        *,
        key: str,
        dtype: str,
        shape: tuple[int, ...],
        order: Order = NO_ORDER,
    ) -> PlannedTensor:
        """Return a tensor that stands for the result; `order` sorts it over the files."""
        file = self.num_sources + len(self.all)
        self.all.append(
            Computed(operation=operation, inputs=tuple(inputs), key=key, dtype=dtype, shape=shape)
        )
        piece = Piece(file=file, offset_bytes=0, size_bytes=tensor_size_bytes(dtype, shape))
        return PlannedTensor(key=key, dtype=dtype, shape=shape, pieces=(piece,), order=order)

    def is_computed(self, tensor: PlannedTensor) -> bool:
        """Whether a part of it is computed."""
        return any(piece.file >= self.num_sources for piece in tensor.pieces)

    def count(self, tensors: Iterable[PlannedTensor]) -> int:
        """How many of these tensors are computed; steps on the way to one do not count."""
        return sum(map(self.is_computed, tensors))

    def transposed(self, tensor: PlannedTensor) -> PlannedTensor:
        """The tensor with its last two dims exchanged; one with fewer dims as it is.

        Raises:
            WeightConvertError: it is made of parts that are transposed themselves.
        """
        if len(tensor.shape) < 2:
            return tensor
        if self.is_computed(tensor):
            piece = tensor.pieces[0]
            former = self.all[piece.file - self.num_sources]
            whole_bytes = tensor_size_bytes(former.dtype, former.shape)
            if former.operation != Transpose() or tensor.pieces != (
                Piece(file=piece.file, offset_bytes=0, size_bytes=whole_bytes),
            ):
                raise WeightConvertError(_TWICE.format(tensor.key))
            return replace(former.inputs[0], key=tensor.key, order=tensor.order)
        *outer, rows, columns = tensor.shape
        return self.add(
            Transpose(),
            (tensor,),
            key=tensor.key,
            dtype=tensor.dtype,
            shape=(*outer, columns, rows),
            order=tensor.order,
        )

    def cast(self, tensor: PlannedTensor, dtype: str) -> PlannedTensor:
        """The tensor in another dtype."""
        if not self.is_computed(tensor):
            return self.add(
                Cast(),
                (tensor,),
                key=tensor.key,
                dtype=dtype,
                shape=tensor.shape,
                order=tensor.order,
            )
        pieces: list[Piece] = []
        for piece in self.settled(tensor).pieces:
            made = self.all[piece.file - self.num_sources]
            again = self.add(
                made.operation, made.inputs, key=made.key, dtype=dtype, shape=made.shape
            )
            pieces += again.pieces
        return replace(tensor, dtype=dtype).made_of(pieces)

    def settled(self, tensor: PlannedTensor) -> PlannedTensor:
        """The tensor with every computed piece whole, as extents read them.

        Raises:
            WeightConvertError: a piece that is no rows of transposed matrices.
        """
        if not self.is_computed(tensor):
            return tensor
        pieces: list[Piece] = []
        for piece in tensor.pieces:
            pieces += [piece] if piece.file < self.num_sources else self._wholes(piece)
        return tensor.made_of(pieces)

    def _wholes(self, piece: Piece) -> list[Piece]:
        """A piece as computed tensors that are whole, one for each matrix that it has rows of."""
        made = self.all[piece.file - self.num_sources]
        if piece.size_bytes == tensor_size_bytes(made.dtype, made.shape):
            return [piece]
        row_bytes = max(tensor_size_bytes(made.dtype, made.shape[-1:]), 1)
        first, inside = divmod(piece.offset_bytes, row_bytes)
        count, rest = divmod(piece.size_bytes, row_bytes)
        if made.operation != Transpose() or inside or rest:
            raise WeightConvertError(_TWICE.format(made.key))
        rows, columns = made.shape[-2:]
        pieces: list[Piece] = []
        while count:
            matrix, row = divmod(first, rows)
            length = min(count, rows - row)
            source = _matrix(made.inputs[0], matrix, rows * row_bytes)
            operation = Transpose(first_row=row, num_rows=length if length < rows else -1)
            shape = (length, columns)
            part = self.add(operation, (source,), key=made.key, dtype=made.dtype, shape=shape)
            pieces += part.pieces
            first, count = first + length, count - length
        return pieces


def _matrix(tensor: PlannedTensor, number: int, size_bytes: int) -> PlannedTensor:
    """One of the matrices that a tensor is made of."""
    pieces = list(tensor.cut(number * size_bytes, size_bytes))
    return replace(tensor, shape=tensor.shape[-2:]).made_of(pieces)


_TWICE = (
    "{}: this way between two formats would compute it twice; convert into the format fused first, "
    "and that into the other one"
)
