"""What a rank holds of a stored tensor: a box, and the memory that is that box.

A stored tensor need not be a parameter: one expert of a fused expert tensor is a box as well, and
its `tensor` is then a view. `BoxMeta` is the same without the memory; plans are made of it.

    Shard(key="wte.weight", tensor=local, global_shape=(50304, 768), offset=(25152, 0))
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from unified_ckpt.boxes import Shape, describe_box
from unified_ckpt.dtypes import stored_dtype


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shard:
    """A box of the stored tensor `key`.

    Attributes:
        key: name of the stored tensor.
        tensor: the memory of the box on any device, its shape is the box's shape; any strided view,
            empty and 0-dim included. `save` reads it, `load` fills it in place.
        global_shape: shape of the stored tensor.
        offset: where the box begins, one number per dim.
        meta: the same box without its memory; derived.

    Raises:
        TypeError: `tensor` is not a plain strided tensor of a dtype that safetensors holds.
        ValueError: the box does not lie inside the stored tensor.
    """

    key: str
    tensor: torch.Tensor
    global_shape: Shape
    offset: Shape
    meta: "BoxMeta" = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "global_shape", tuple(int(n) for n in self.global_shape))
        object.__setattr__(self, "offset", tuple(int(n) for n in self.offset))
        self._check_tensor()
        meta = BoxMeta(
            key=self.key,
            dtype=stored_dtype(self.tensor.dtype).name,
            global_shape=self.global_shape,
            offset=self.offset,
            shape=tuple(self.tensor.shape),
        )
        object.__setattr__(self, "meta", meta)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxMeta:
    """A box of the stored tensor `key`, as pure data; `dtype` is a safetensors name like `BF16`."""

    key: str
    dtype: str
    global_shape: Shape
    offset: Shape
    shape: Shape

    def __post_init__(self) -> None:
        if not isinstance(self.key, str) or not self.key or self.key == "__metadata__":
            raise ValueError(f"key {self.key!r} cannot name a stored tensor")
        if not len(self.global_shape) == len(self.offset) == len(self.shape):
            raise ValueError(
                f"{self.key!r}: global_shape {self.global_shape}, offset {self.offset} and the "
                f"tensor's shape {self.shape} must have the same number of dims"
            )
        for length, begin, size in zip(self.global_shape, self.offset, self.shape, strict=True):
            if begin < 0 or length < 0 or begin + size > length:
                raise ValueError(
                    f"{self.key!r}: box {describe_box(self.offset, self.shape)} does not lie "
                    f"inside global_shape {self.global_shape}"
                )
        if self.dtype == "F4" and not self.shape:
            raise ValueError(f"{self.key!r}: a packed F4 tensor must have at least one dim")

    def to_json(self) -> list[Any]:
        """Return the box as JSON types."""
        return [self.key, self.dtype, self.global_shape, self.offset, self.shape]

    @classmethod
    def from_json(cls, value: list[Any]) -> "BoxMeta":
        """Undo `to_json`."""
        key, dtype, global_shape, offset, shape = value
        return cls(
            key=key,
            dtype=dtype,
            global_shape=tuple(global_shape),
            offset=tuple(offset),
            shape=tuple(shape),
        )

    @property
    def numel(self) -> int:
        """Number of elements of the box."""
        return math.prod(self.shape)
