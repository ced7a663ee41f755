"""What a rank holds of a stored tensor: a box, and the memory that is that box.

A stored tensor need not be a parameter: one expert of a fused expert tensor is a box as well, and
its `tensor` is then a view. A flat range of a box's row-major elements is held by sharding stage 1
and by flat FSDP parameters. `BoxMeta` is the same without the memory; plans are made of it.

    Shard.of("wte.weight", local, global_shape=(50304, 768), offset=(25152, 0))
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from unified_ckpt.errors import CheckpointTypeError, CheckpointValueError, check_type
from unified_ckpt.geometry.box import Box
from unified_ckpt.geometry.tensors import stored_dtype


@dataclass(frozen=True, slots=True)
class BoxMeta:
    """A box of the stored tensor `key`, as pure data; `dtype` is a safetensors name like `BF16`."""

    key: str
    dtype: str
    box: Box

    def __post_init__(self) -> None:
        if not isinstance(self.key, str) or not self.key or self.key == "__metadata__":
            raise CheckpointValueError(f"key {self.key!r} cannot name a stored tensor")
        if self.dtype == "F4" and not self.box.local_shape:
            raise CheckpointValueError(f"{self.key!r}: a packed F4 tensor needs at least one dim")

    def to_json(self) -> list[Any]:
        """Return the box as JSON types."""
        box = self.box
        record = [self.key, self.dtype, box.global_shape, box.offset, box.local_shape]
        extra = [box.flattened_range, box.replica_id]
        return record if extra == [None, None] else record + extra

    @classmethod
    def from_json(cls, value: list[Any]) -> "BoxMeta":
        """Undo `to_json`."""
        key, dtype, *box = value
        return cls(key, dtype, Box(*box))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shard:
    """A box of the stored tensor `key`, or a flat range of one, with its memory.

    Attributes:
        key: name of the stored tensor.
        tensor: the memory on any device: of the box's shape, or one-dim with a flat range;
            any strided view, empty and 0-dim included. `save` reads it, `load` fills it in place.
        box: which part of the stored tensor that is.
        meta: the same box without its memory; derived.

    Raises:
        CheckpointTypeError: `tensor` is not a plain strided tensor of a dtype that safetensors
            holds.
        CheckpointValueError: the tensor is not the memory of the box.
    """

    key: str
    tensor: torch.Tensor
    box: Box
    meta: BoxMeta = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.box, Box):  # the message costs more than the check
            check_type(f"{self.key!r}: box", self.box, Box)
        _check_tensor(self.key, self.tensor)
        meta = BoxMeta(self.key, stored_dtype(self.tensor.dtype).name, self.box)
        object.__setattr__(self, "meta", meta)
        if tuple(self.tensor.shape) != self.box.memory_shape:
            raise CheckpointValueError(
                f"{self.key!r}: tensor has shape {tuple(self.tensor.shape)}, but local_shape="
                f"{self.box.local_shape}, flattened_range={self.box.flattened_range} say "
                f"{self.box.memory_shape}"
            )

    @classmethod
    def of(
        cls,
        key: str,
        tensor: torch.Tensor,
        *,
        global_shape: Sequence[int],
        offset: Sequence[int],
        replica_id: int | None = None,
    ) -> "Shard":
        """Make the shard of a tensor that is the whole box which begins at `offset`.

        Raises:
            CheckpointTypeError, CheckpointValueError: as of the class, or of `Box`.
        """
        _check_tensor(key, tensor)
        try:
            box = Box(tuple(global_shape), tuple(offset), tensor.shape, replica_id=replica_id)
        except (CheckpointTypeError, CheckpointValueError) as error:
            raise type(error)(f"{key!r}: {error}") from error
        return cls(key=key, tensor=tensor, box=box)

    def boxes(self) -> "list[Shard]":
        """Return the shard without flat ranges: itself, or a view of its memory per box."""
        if self.box.flattened_range is None:
            return [self]
        plain, begin = [], 0
        for box in self.box.unflattened():
            memory = self.tensor[begin : begin + box.numel].view(box.local_shape)
            plain.append(Shard(key=self.key, tensor=memory, box=box))
            begin += box.numel
        return plain


def check_plain(key: str, tensor: torch.Tensor) -> None:
    """Refuse tensors that have no shape yet, or none that is a box.

    Raises:
        CheckpointTypeError: names the tensor.
    """
    if isinstance(tensor, UninitializedTensorMixin):
        raise CheckpointTypeError(
            f"{key!r}: {type(tensor).__name__} has no shape yet; run the module once, so that its "
            "lazy parameters are made, or add it to ignored_keys"
        )
    if tensor.is_nested:
        raise CheckpointTypeError(
            f"{key!r}: a nested tensor has no shape that every layout could load; pass its values "
            "and offsets"
        )


def _check_tensor(key: str, tensor: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise CheckpointTypeError(f"{key!r}: tensor is a {type(tensor).__name__}, not a Tensor")
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        # DTensor, FakeTensor and the like: the object is not the memory of its values.
        raise CheckpointTypeError(
            f"{key!r}: tensor is a {type(tensor).__name__}; pass its local tensor and box"
        )
    if tensor.layout != torch.strided:
        raise CheckpointTypeError(f"{key!r}: tensor is not a plain strided tensor: {tensor.layout}")
    if tensor.is_quantized:
        raise CheckpointTypeError(
            f"{key!r}: tensor is quantized ({tensor.dtype}); pass its int_repr() and its scales"
        )
    if tensor.device.type == "meta":
        raise CheckpointTypeError(f"{key!r}: tensor is on the meta device and holds no values")
    if not tensor.data_ptr() and tensor.numel():
        raise CheckpointTypeError(f"{key!r}: the memory of the tensor has been freed")
