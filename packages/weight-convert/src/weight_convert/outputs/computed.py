"""Tensors that are computed from others, as data: what the engine does beside copying ranges.

A computed tensor stands in a plan as a tensor of one piece of a file that nobody stored: its number
is behind those of the source's files, and the engine writes what `compute/` makes of the operation
where it would copy a range. So planning, dealing to files and dry runs need no torch.

    work = Computations(num_sources=len(catalog.files))
    tensor = work.add(Cast(), (source,), key="norm.weight", dtype="F32", shape=(8,))
    work.all[0].inputs     # (source,)

Invariant: an extent reads a computed tensor whole; its inputs are ranges of real files.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from weight_convert.files import tensor_size_bytes
from weight_convert.operations import Operation
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
