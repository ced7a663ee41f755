"""Which part of a stored tensor a rank holds: a box of it, or a flat range of a box.

Everything that describes a part of a tensor holds one `Box`: shards, plans, layouts, staging.

    Box.whole((50304, 768)).chunk(0, num=2, index=1)
    # Box(global_shape=(50304, 768), offset=(25152, 0), local_shape=(25152, 768))
"""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace

from unified_ckpt.errors import CheckpointTypeError, CheckpointValueError
from unified_ckpt.geometry.flat import flat_boxes
from unified_ckpt.geometry.regions import Shape, describe_box


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a tensor: where it begins and its length in every dim; pure data.

    Attributes:
        global_shape: shape of the whole tensor.
        offset: where the box begins, one number per dim.
        local_shape: shape of the box.
        flattened_range: (begin, end) of the row-major elements of the box that are held; None for
            all of them.
        replica_id: equal boxes on several ranks: the lowest one is written, ties are balanced by
            bytes. None leaves the choice to the plan.

    Raises:
        CheckpointValueError: the box does not lie inside the tensor.
        CheckpointTypeError: something is no whole number.
    """

    global_shape: Shape
    offset: Shape
    local_shape: Shape
    flattened_range: tuple[int, int] | None = None
    replica_id: int | None = None

    def __post_init__(self) -> None:
        try:
            for name in ("global_shape", "offset", "local_shape"):
                object.__setattr__(self, name, tuple(map(operator.index, getattr(self, name))))
            if self.flattened_range is not None:
                ends = tuple(map(operator.index, self.flattened_range))
                object.__setattr__(self, "flattened_range", ends)
        except TypeError as error:
            raise CheckpointTypeError(f"a box is made of whole numbers: {error}") from error
        if not len(self.global_shape) == len(self.offset) == len(self.local_shape):
            raise CheckpointValueError(
                f"global_shape {self.global_shape}, offset {self.offset} and local_shape "
                f"{self.local_shape} must have the same number of dims"
            )
        dims = zip(self.global_shape, self.offset, self.local_shape, strict=True)
        for length, begin, size in dims:
            if begin < 0 or length < 0 or size < 0 or begin + size > length:
                raise CheckpointValueError(
                    f"{self} does not lie inside global_shape {self.global_shape}"
                )
        begin, end = self.flattened_range or (0, 0)
        if not 0 <= begin <= end <= self._box_numel:
            raise CheckpointValueError(
                f"flattened_range {self.flattened_range} does not lie in the {self._box_numel} "
                f"elements of its box {self.local_shape}"
            )

    def __str__(self) -> str:
        return describe_box(self.offset, self.local_shape)

    @classmethod
    def whole(cls, global_shape: Sequence[int]) -> "Box":
        """Return the box that is all of a tensor."""
        shape = tuple(global_shape)
        return cls(shape, (0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        """Number of elements that are held."""
        if self.flattened_range is not None:
            return self.flattened_range[1] - self.flattened_range[0]
        return self._box_numel

    @property
    def memory_shape(self) -> Shape:
        """Shape of a tensor that is the memory of this box: of one dim for a flat range."""
        return self.local_shape if self.flattened_range is None else (self.numel,)

    @property
    def _box_numel(self) -> int:
        return math.prod(self.local_shape)

    def cut(self, dim: int, *, begin: int, length: int) -> "Box":
        """Return the part of this box that begins at `begin` of its own dim `dim`.

        Raises:
            CheckpointValueError: it does not lie inside, or the box has a flat range already.
        """
        self._check_not_flat(f"along dim {dim}")
        if not 0 <= begin <= begin + length <= self._length(dim):
            raise CheckpointValueError(
                f"dim {dim}, {begin} to {begin + length}: not inside a box of {self.local_shape}"
            )
        offset, shape = list(self.offset), list(self.local_shape)
        offset[dim] += begin
        shape[dim] = length
        return replace(self, offset=tuple(offset), local_shape=tuple(shape))

    def chunk(self, dim: int, *, num: int, index: int) -> "Box":
        """Cut as `torch.chunk` and DTensor do: equal parts, the last ones shorter or empty."""
        begin, length = chunk_range(self._length(dim), num=num, index=index)
        return self.cut(dim, begin=begin, length=length)

    def sizes(self, dim: int, *, sizes: Sequence[int], index: int) -> "Box":
        """Cut into parts of any lengths, which must add up to the dim."""
        if not 0 <= index < len(sizes):
            raise CheckpointValueError(
                f"part {index} of sizes {list(sizes)}: there is no such part"
            )
        if sum(sizes) != self._length(dim) or min(sizes) < 0:
            raise CheckpointValueError(
                f"sizes {sizes} do not add up to dim {dim} of {self.local_shape}"
            )
        return self.cut(dim, begin=sum(sizes[:index]), length=sizes[index])

    def flat_chunk(self, *, num: int, index: int) -> "Box":
        """Cut the row-major elements into equal ranges, the last ones shorter or empty."""
        self._check_not_flat("again")
        begin, length = chunk_range(self.numel, num=num, index=index)
        return replace(self, flattened_range=(begin, begin + length))

    def unflattened(self) -> "list[Box]":
        """Return what is held as boxes without flat ranges, in row-major order."""
        if self.flattened_range is None:
            return [self]
        inside = flat_boxes(self.local_shape, *self.flattened_range)
        if not inside and self.local_shape:  # keeps the tensor known where nothing of it is held
            inside = [((0,) * len(self.local_shape), (0, *self.local_shape[1:]))]
        return [
            Box(
                self.global_shape,
                tuple(map(operator.add, self.offset, offset)),
                shape,
                replica_id=self.replica_id,
            )
            for offset, shape in inside
        ]

    def _check_not_flat(self, how: str) -> None:
        if self.flattened_range is not None:
            raise CheckpointValueError(f"a flat range {self.flattened_range} cannot be cut {how}")

    def _length(self, dim: int) -> int:
        if not 0 <= dim < len(self.local_shape):
            raise CheckpointValueError(
                f"dim {dim} of a box of shape {self.local_shape} is not there"
            )
        return self.local_shape[dim]


def chunk_range(length: int, *, num: int, index: int) -> tuple[int, int]:
    """Return (begin, length) of a part of `length` in `num` parts, as `torch.chunk` cuts."""
    if num < 1 or not 0 <= index < num:
        raise CheckpointValueError(f"part {index} of {num} parts; expected 0 <= index < num")
    step = -(-length // num)
    begin = min(length, index * step)
    return begin, min(step, length - begin)
