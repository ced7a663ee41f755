"""What is checked: a tensor before and after, and how many ranks on which kind of device.

Case(source=experts, target=wider, device_type="cpu").world_size    # ranks 0 to the highest
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch

from mesh_spmd.errors import MeshTypeError, MeshValueError
from mesh_spmd.layout import TensorSpec
from mesh_spmd.mesh import ProcessMesh

MOST_RANKS = 32
MOST_ELEMENTS = 2**25  # of all ranks, each of which makes the whole once, in numbers of 8 bytes
DEVICE_TYPES = ("cpu", "cuda")
_INTEGERS = frozenset(
    {torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64}
    | {torch.int8, torch.int16, torch.int32, torch.int64}
)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A change of layout that local ranks are to carry out. Plain data, sent to each of them.

    Raises:
        MeshTypeError: it is partial in a way that `reshard_tensor` does not reduce, or of a dtype
            whose elements cannot be told apart.
        MeshValueError: shapes or dtypes differ, or it is too much for one machine.
    """

    source: TensorSpec
    target: TensorSpec
    device_type: str = "cpu"

    def __post_init__(self) -> None:
        if self.device_type not in DEVICE_TYPES:
            raise MeshValueError(
                f"device type {self.device_type!r} was given; ranks are checked on "
                f"{' or '.join(DEVICE_TYPES)}"
            )
        if (self.source.shape, self.source.dtype) != (self.target.shape, self.target.dtype):
            raise MeshValueError(
                f"the source is {self.source.dtype} of {self.source.shape}, the target "
                f"{self.target.dtype} of {self.target.shape}; resharding keeps shape and dtype"
            )
        self._check_kinds()
        if self.world_size > MOST_RANKS:
            raise MeshValueError(
                f"the layouts need ranks 0 to {self.world_size - 1}, {self.world_size} processes "
                f"of this machine; at most {MOST_RANKS} are started: make axes smaller, or let "
                "ranks= begin at 0"
            )
        if self.source.numel * self.world_size > MOST_ELEMENTS:
            raise MeshValueError(
                f"{self.source.numel:,} elements on {self.world_size} ranks are "
                f"{self.source.numel * self.world_size:,}, since each rank makes the whole tensor "
                f"once; at most {MOST_ELEMENTS:,} are checked: make sizes smaller that no axis "
                "cuts, or all, with the same remainders"
            )

    @property
    def world_size(self) -> int:
        """How many processes there are: as many as the highest rank of the meshes needs."""
        return max(*self.source.mesh.ranks, *self.target.mesh.ranks) + 1

    @property
    def meshes(self) -> tuple[ProcessMesh, ...]:
        """The meshes of both sides, each once."""
        return tuple(dict.fromkeys((self.source.mesh, self.target.mesh)))

    def _check_kinds(self) -> None:
        if self.target.partials:
            raise MeshTypeError(
                f"the target is partial over {', '.join(self.target.partials)}; reshard_tensor, "
                "which is checked, ends with whole values: leave the reduction out of the target"
            )
        others = {a: kind for a, kind in self.source.partials.items() if kind != "sum"}
        if others:
            raise MeshTypeError(
                f"the source has a reduction due ({others}) that reshard_tensor, which is checked, "
                "does not carry out; give sum, or leave it out"
            )
        dtype = self.source.dtype
        if not (dtype.is_floating_point or dtype.is_complex or dtype in _INTEGERS):
            raise MeshTypeError(
                f"elements of {dtype} cannot be made by their numbers; give a floating, complex or "
                "integer dtype, as in bfloat16"
            )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class At:
    """One rank of a case, and the device of its tensors."""

    case: Case
    rank: int
    device: torch.device
