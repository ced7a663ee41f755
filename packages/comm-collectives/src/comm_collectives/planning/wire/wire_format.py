"""What one MoE layer puts on the wire, in bytes: pure functions of counts, without torch.

Executor and planner both ask here. Routes: `flat`, one row per routed choice to the expert's rank;
`dedup`, one per token and rank; `hierarchical`, one per token and node to the rank there with this
rank's local index, which forwards one per token and rank inside its node (`ranks_per_node`
consecutive ranks). Dispatch and the backward of combine go from tokens to experts, the other two
movements the same way back. To one peer go, of u unique tokens and n choices (flat: u = n):

    movement             flat                  dedup, and both stages of hierarchical
    dispatch             n rows | n weights    u rows | n weights | n int32 row numbers
    dispatch_backward    n rows | n weights    u rows | n weights
    combine              n rows                u rows
    combine_backward     n rows                u rows

What stands behind the rows fills whole gap rows, so that the messages of all peers are one matrix.
Rows that travel with weights are padded to whole weights and row numbers, rows alone not at all.
Counts travel beforehand, and what a rank keeps is no message; matrices show it on their diagonal.
"""

from dataclasses import dataclass, replace
from typing import Literal, Self, get_args

from comm_collectives.errors import CommTypeError, CommValueError
from comm_collectives.units import round_up

Route = Literal["flat", "dedup", "hierarchical"]
Movement = Literal["dispatch", "combine", "dispatch_backward", "combine_backward"]
ROUTES: tuple[Route, ...] = get_args(Route)
MOVEMENTS: tuple[Movement, ...] = get_args(Movement)

BLOCK_ELEMENTS = 128
SCALE_BYTES = 4  # fp32
INDEX_BYTES = 4  # int32

_CARRIES_WEIGHTS = ("dispatch", "dispatch_backward")


def check_sizes(sizes: object, *names: str, least: int = 1) -> None:
    """Raise CommTypeError for an attribute that is no integer, CommValueError below `least`."""
    for name in names:
        size = getattr(sizes, name)
        if not hasattr(size, "__index__"):
            raise CommTypeError(f"{name}={size!r} is a {type(size).__name__}; give an integer")
        if size < least:
            raise CommValueError(f"{name}={size} must be at least {least}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFormat:
    """How one token's row travels.

    A row has `hidden_size` elements of `itemsize` bytes, or if `block_scaled` one byte for each and
    one fp32 scale per block of 128. `weight_itemsize` is that of a routing weight.

    Raises:
        ValueError, TypeError: a size below 1, or that is no integer.
    """

    hidden_size: int
    itemsize: int
    weight_itemsize: int
    block_scaled: bool = False

    def __post_init__(self) -> None:
        check_sizes(self, "hidden_size", "itemsize", "weight_itemsize")

    @property
    def bare_row_bytes(self) -> int:
        """Bytes of a row where rows travel alone."""
        if not self.block_scaled:
            return self.hidden_size * self.itemsize
        num_blocks = -(-self.hidden_size // BLOCK_ELEMENTS)
        return round_up(self.hidden_size, SCALE_BYTES) + SCALE_BYTES * num_blocks

    @property
    def row_bytes(self) -> int:
        """Bytes of a row where weights travel along: whole elements, weights and row numbers."""
        element = SCALE_BYTES if self.block_scaled else self.itemsize
        # Sizes of elements are powers of two, so the larger is a multiple of the smaller.
        return round_up(self.bare_row_bytes, max(element, self.weight_itemsize, INDEX_BYTES))

    def during(self, movement: Movement, *, quantize_backward: bool = False) -> Self:
        """Return the format in a movement, this being the one of dispatch.

        Combine travels in full, and so do both backwards unless `quantize_backward`.
        """
        if movement == "dispatch" or (quantize_backward and movement.endswith("backward")):
            return self
        return replace(self, block_scaled=False)

    def row_bytes_of(self, movement: Movement) -> int:
        """Bytes of a row in a movement."""
        return self.row_bytes if movement in _CARRIES_WEIGHTS else self.bare_row_bytes

    def numbers_at(self, choices: int) -> int:
        """Bytes from the weights of so many choices to their row numbers."""
        return round_up(choices * self.weight_itemsize, INDEX_BYTES)

    def gap_rows(self, route: Route, movement: Movement, choices: int) -> int:
        """Whole rows behind those of a message, for what its choices have to say."""
        if movement not in _CARRIES_WEIGHTS:
            return 0
        has_numbers = movement == "dispatch" and route != "flat"
        num_bytes = self.numbers_at(choices) + INDEX_BYTES * choices * has_numbers
        return -(-num_bytes // self.row_bytes)


def message_bytes(
    route: Route, movement: Movement, row_format: RowFormat, *, tokens: int, choices: int
) -> int:
    """Return the size of the message that carries `choices` choices of `tokens` unique tokens.

    For both stages of `hierarchical` and for `dedup` the answer is the same; for `flat` the number
    of tokens does not matter.
    """
    rows = choices if route == "flat" else tokens
    rows += row_format.gap_rows(route, movement, choices)
    return rows * row_format.row_bytes_of(movement)
