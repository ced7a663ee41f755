"""What a transfer costs: latency for each message, time for each byte, near and far.

Topology(ranks_per_node=8)                             # an H200 node, roughly
Topology(ranks_per_node=8, far_bytes_per_s=12.5e9)     # 100 Gbit/s for each rank between nodes
"""

from dataclasses import dataclass
from typing import final

from mesh_spmd._checks import check_kind
from mesh_spmd.errors import MeshValueError


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """An alpha-beta model: ranks stand in nodes; messages inside one are near, others far.

    Args:
        ranks_per_node: ranks 0 to n - 1 are the first node, and so on.
        near_latency_s: what a message inside a node costs however short it is.
        far_latency_s: the same for a message between nodes.
        near_bytes_per_s: bytes a rank sends, or receives, inside a node in a second.
        far_bytes_per_s: the same between nodes.

    Raises:
        MeshTypeError: something is no number.
        MeshValueError: a number is not above zero; a latency may be zero.
    """

    ranks_per_node: int = 8
    near_latency_s: float = 5e-6
    far_latency_s: float = 2e-5
    near_bytes_per_s: float = 4e11
    far_bytes_per_s: float = 4e10

    def __post_init__(self) -> None:
        check_kind(self.ranks_per_node, int, "ranks_per_node must be a whole number")
        for name in Topology.__slots__:
            check_kind(getattr(self, name), int | float, f"{name} must be a number")
            value, may_be_zero = getattr(self, name), name.endswith("latency_s")
            if not (value > 0 or (value == 0 and may_be_zero)):
                wanted = "0 or more" if may_be_zero else "a number above 0"
                raise MeshValueError(f"{name}={value} of a Topology; give {wanted}")

    def near(self, a: int, b: int) -> bool:
        """Whether two ranks stand in the same node."""
        return a // self.ranks_per_node == b // self.ranks_per_node

    def seconds(self, *, messages: tuple[int, int], num_bytes: tuple[int, int]) -> float:
        """Return what one rank needs for its (near, far) messages and bytes of one direction."""
        return (
            messages[0] * self.near_latency_s
            + messages[1] * self.far_latency_s
            + num_bytes[0] / self.near_bytes_per_s
            + num_bytes[1] / self.far_bytes_per_s
        )
