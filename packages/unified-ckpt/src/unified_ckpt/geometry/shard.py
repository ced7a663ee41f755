"""What a rank holds of a stored tensor: a box, and the memory that is that box.

A stored tensor need not be a parameter: one expert of a fused expert tensor is a box as well, and
its `tensor` is then a view. A flat range of a box's row-major elements is held by sharding stage 1
and by flat FSDP parameters. `BoxMeta` is the same without the memory; plans are made of it.

    Shard(key="wte.weight", tensor=local, global_shape=(50304, 768), offset=(25152, 0))
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from unified_ckpt.geometry.flat import flat_boxes
from unified_ckpt.geometry.regions import Shape, describe_box
from unified_ckpt.geometry.tensors import stored_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxMeta:
    """A box of the stored tensor `key`, as pure data; `dtype` is a safetensors name like `BF16`.

    With `flattened_range` only those row-major elements of the box are held. `replica_id` tells
    equal boxes on several ranks apart: the lowest one is written; None leaves it to the plan.
    """

    key: str
    dtype: str
    global_shape: Shape
    offset: Shape
    shape: Shape
    flattened_range: tuple[int, int] | None = None
    replica_id: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.key, str) or not self.key or self.key == "__metadata__":
            raise ValueError(f"key {self.key!r} cannot name a stored tensor")
        if not len(self.global_shape) == len(self.offset) == len(self.shape):
            raise ValueError(
                f"{self.key!r}: global_shape {self.global_shape}, offset {self.offset} and the "
                f"tensor's shape {self.shape} must have the same number of dims"
            )
        for length, begin, size in zip(self.global_shape, self.offset, self.shape, strict=True):
            if begin < 0 or length < 0 or size < 0 or begin + size > length:
                raise ValueError(
                    f"{self.key!r}: box {describe_box(self.offset, self.shape)} does not lie "
                    f"inside global_shape {self.global_shape}"
                )
        if self.dtype == "F4" and not self.shape:
            raise ValueError(f"{self.key!r}: a packed F4 tensor must have at least one dim")
        if self.flattened_range is not None:
            begin, end = self.flattened_range
            if not 0 <= begin <= end <= math.prod(self.shape):
                raise ValueError(
                    f"{self.key!r}: flattened_range {self.flattened_range} does not lie in the "
                    f"{math.prod(self.shape)} elements of its box {self.shape}"
                )

    def to_json(self) -> list[Any]:
        """Return the box as JSON types."""
        record = [self.key, self.dtype, self.global_shape, self.offset, self.shape]
        extra = [self.flattened_range, self.replica_id]
        return record if extra == [None, None] else record + extra

    @classmethod
    def from_json(cls, value: list[Any]) -> "BoxMeta":
        """Undo `to_json`."""
        key, dtype, global_shape, offset, shape = value[:5]
        flattened_range, replica_id = value[5:] or (None, None)
        return cls(
            key=key,
            dtype=dtype,
            global_shape=tuple(global_shape),
            offset=tuple(offset),
            shape=tuple(shape),
            flattened_range=None if flattened_range is None else tuple(flattened_range),
            replica_id=replica_id,
        )

    @property
    def numel(self) -> int:
        """Number of elements that are held."""
        if self.flattened_range is not None:
            return self.flattened_range[1] - self.flattened_range[0]
        return math.prod(self.shape)

    def boxes(self) -> list[tuple[Shape, Shape]]:
        """Return what is held as (offset in the stored tensor, shape) boxes, in row-major order."""
        if self.flattened_range is None:
            return [(self.offset, self.shape)]
        inside = flat_boxes(self.shape, *self.flattened_range)
        if not inside and self.shape:  # keeps the tensor known where nothing of it is held
            inside = [((0,) * len(self.shape), (0, *self.shape[1:]))]
        return [
            (tuple(a + b for a, b in zip(self.offset, offset, strict=True)), shape)
            for offset, shape in inside
        ]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shard:
    """A box of the stored tensor `key`, or a flat range of one.

    Attributes:
        key: name of the stored tensor.
        tensor: the memory on any device: of the box's shape, or one-dim with `flattened_range`;
            any strided view, empty and 0-dim included. `save` reads it, `load` fills it in place.
        global_shape: shape of the stored tensor.
        offset: where the box begins, one number per dim.
        local_shape: shape of the box; None means the tensor's shape, or with `flattened_range` and
            an offset of zeros the whole stored tensor.
        flattened_range: (begin, end) of the row-major elements of the box that `tensor` holds.
        replica_id: equal boxes on several ranks: the lowest one is written, ties are balanced by
            bytes. None, the default, leaves the choice to the plan.
        meta: the same box without its memory; derived.

    Raises:
        TypeError: `tensor` is not a plain strided tensor of a dtype that safetensors holds.
        ValueError: the box does not lie inside the stored tensor, or the tensor is not its memory.
    """

    key: str
    tensor: torch.Tensor
    global_shape: Shape
    offset: Shape
    local_shape: Shape | None = None
    flattened_range: tuple[int, int] | None = None
    replica_id: int | None = None
    meta: BoxMeta = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "global_shape", tuple(int(n) for n in self.global_shape))
        object.__setattr__(self, "offset", tuple(int(n) for n in self.offset))
        self._check_tensor()
        if self.flattened_range is not None:
            begin, end = self.flattened_range
            object.__setattr__(self, "flattened_range", (int(begin), int(end)))
        object.__setattr__(self, "local_shape", self._box_shape())
        meta = BoxMeta(
            key=self.key,
            dtype=stored_dtype(self.tensor.dtype).name,
            global_shape=self.global_shape,
            offset=self.offset,
            shape=self._box_shape(),
            flattened_range=self.flattened_range,
            replica_id=self.replica_id,
        )
        object.__setattr__(self, "meta", meta)
        expected = (meta.numel,) if self.flattened_range is not None else meta.shape
        if tuple(self.tensor.shape) != expected:
            raise ValueError(
                f"{self.key!r}: tensor has shape {tuple(self.tensor.shape)}, but "
                f"local_shape={meta.shape}, flattened_range={self.flattened_range} say {expected}"
            )

    def boxes(self) -> "list[Shard]":
        """Return the shard without flat ranges: itself, or a view of its memory per box."""
        if self.flattened_range is None:
            return [self]
        plain, begin = [], 0
        for offset, shape in self.meta.boxes():
            numel = math.prod(shape)
            plain.append(
                Shard(
                    key=self.key,
                    tensor=self.tensor[begin : begin + numel].view(shape),
                    global_shape=self.global_shape,
                    offset=offset,
                    replica_id=self.replica_id,
                )
            )
            begin += numel
        return plain

    def _box_shape(self) -> Shape:
        if self.local_shape is not None:
            return tuple(int(n) for n in self.local_shape)
        if self.flattened_range is None:
            return tuple(self.tensor.shape)
        if any(self.offset):
            raise ValueError(
                f"{self.key!r}: flattened_range counts in a box at {self.offset}; give local_shape"
            )
        return self.global_shape

    def _check_tensor(self) -> None:
        tensor = self.tensor
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{self.key!r}: tensor is a {type(tensor).__name__}, not a Tensor")
        if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            # DTensor, FakeTensor and the like: the object is not the memory of its values.
            raise TypeError(
                f"{self.key!r}: tensor is a {type(tensor).__name__}; pass its local tensor and box"
            )
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise TypeError(f"{self.key!r}: tensor is not a plain strided tensor: {tensor.layout}")
        if tensor.device.type == "meta":
            raise TypeError(f"{self.key!r}: tensor is on the meta device and holds no values")
