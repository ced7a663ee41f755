"""Carry rows from tokens to experts and back; the four movements that dispatch and combine need.

Each route is a `Routing`. All bring the experts the same rows in the same order; they differ in how
often a token's row travels, and therefore in the order in which `combine` adds.

Legend: T tokens, D hidden size, K choices per token, N choices that name an expert, R rows of the
local experts with padding, C columns of a row as it travels.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, final

import torch

from comm_collectives.call import Call
from comm_collectives.collectives import exchange_rows
from comm_collectives.moe.rows import Bags, Payload, Placing, RowCodec, SortedChoices, row_codec
from comm_collectives.planning.wire import Movement, RowFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class WireRow:
    """How the rows [N, D] of one movement travel: as their elements, or as bytes of a codec.

    Attributes:
        columns: elements of a row as `encode` returns it.
        wire_columns: the same with the room that weights beside it need.
        size: the sizes in bytes.
    """

    hidden: int
    dtype: torch.dtype
    codec: RowCodec | None
    columns: int
    wire_columns: int
    size: RowFormat

    def encode(self, x_ND: torch.Tensor) -> torch.Tensor:
        """Return rows [N, C] as they travel, which may be `x_ND` itself."""
        return x_ND if self.codec is None else self.codec.encode(x_ND)

    def decode(self, rows_NC: torch.Tensor) -> torch.Tensor:
        """Return rows [N, D] as they were, but for the rounding; zero bytes are zeros."""
        if self.codec is None:
            return rows_NC
        return self.codec.decode(rows_NC, hidden=self.hidden, dtype=self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """One movement: which it is, what rows become on the wire, and the call that makes it.

    `call` is None where nothing is exchanged.
    """

    movement: Movement
    payload: Payload = "full"
    call: Call | None = None

    @property
    def name(self) -> str:
        """The movement as errors name it."""
        return self.movement if self.call is None else str(self.call)

    def form(self, x_ND: torch.Tensor, weight_itemsize: int = 1) -> WireRow:
        """Return how the rows of `x_ND` travel, with weights of that many bytes beside them."""
        return _row_form(self.movement, self.payload, x_ND.shape[1], x_ND.dtype, weight_itemsize)

    def exchange(
        self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], out: torch.Tensor
    ) -> None:
        """Exchange contiguous rows; `sent` and `received` by rank. Collective.

        This is the one place where rows of tokens are handed to the group.
        """
        if self.call is None:
            raise RuntimeError(f"{self.movement} has no call to exchange rows in")
        exchange_rows(self.call, rows, sent, received, out)


@lru_cache(maxsize=256)
def _row_form(
    movement: Movement, payload: Payload, hidden: int, dtype: torch.dtype, weight_itemsize: int
) -> WireRow:
    is_full = payload == "full"
    size = RowFormat(
        hidden_size=hidden,
        itemsize=dtype.itemsize,
        weight_itemsize=weight_itemsize,
        block_scaled=not is_full,
    )
    itemsize = dtype.itemsize if is_full else 1
    return WireRow(
        hidden=hidden,
        dtype=dtype,
        codec=None if is_full else row_codec(payload, dtype),
        columns=size.bare_row_bytes // itemsize,
        wire_columns=size.row_bytes_of(movement) // itemsize,
        size=size,
    )


class Routing(ABC):
    """The four movements.

    `to_experts` comes first. It may come again, with the same rows or others: the routes that learn
    from it which rows arrive then learn the same.
    """

    exchanges: ClassVar[bool]
    num_tokens_per_expert: tuple[int, ...]

    @abstractmethod
    def to_experts(
        self, x_TD: torch.Tensor, weight_TK: torch.Tensor, leg: Leg
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Bring rows and their weights to the experts: x_RD and weight_R, padding zero."""

    @abstractmethod
    def rows_to_experts(self, x_TD: torch.Tensor, leg: Leg) -> torch.Tensor:
        """Bring rows alone to the experts: x_RD, padding zero."""

    @abstractmethod
    def rows_to_tokens(self, y_RD: torch.Tensor, leg: Leg) -> torch.Tensor:
        """Bring rows back and sum those of each token: y_TD."""

    @abstractmethod
    def to_tokens(
        self, y_RD: torch.Tensor, weight_R: torch.Tensor, leg: Leg
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Bring rows and weights back: y_TD summed, weight_TK each in its place."""


class RouteRequest(ABC):
    """What this rank's choices ask for, before it is known what the others ask.

    Attributes:
        counts: what each rank has to be told, equally many numbers for each.
    """

    counts: Sequence[Sequence[int]]

    @abstractmethod
    def routing(self, received: Sequence[Sequence[int]], *, alignment: int) -> Routing:
        """Return the routing, given what each rank told this one."""


@final
class _LocalRouting(Routing):
    """One rank holds all experts: rows are reordered, and rounded as on a wire, not exchanged."""

    exchanges = False

    def __init__(self, choices: SortedChoices, placing: Placing) -> None:
        self._choices = choices
        self._num_rows = placing.num_rows
        self._local_N: torch.Tensor | None = None
        if placing.is_padded:
            device = choices.order_N.device
            (self._local_N,) = spread([placing.local_shift_B], placing.block_rows_B, device)
        self.num_tokens_per_expert = placing.num_tokens_per_expert

    def to_experts(
        self, x_TD: torch.Tensor, weight_TK: torch.Tensor, leg: Leg
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weight_N = self._choices.sorted_weights(weight_TK)
        return self.rows_to_experts(x_TD, leg), self._pad(weight_N)

    def rows_to_experts(self, x_TD: torch.Tensor, leg: Leg) -> torch.Tensor:
        return self._pad(_rounded(x_TD, leg).index_select(0, self._choices.token_N))

    def rows_to_tokens(self, y_RD: torch.Tensor, leg: Leg) -> torch.Tensor:
        return self._bags().sum(_rounded(y_RD, leg))

    def to_tokens(
        self, y_RD: torch.Tensor, weight_R: torch.Tensor, leg: Leg
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weight_N = weight_R
        if self._local_N is not None:
            weight_N = weight_R.index_select(0, self._local_N)
        return self.rows_to_tokens(y_RD, leg), self._choices.unsorted_weights(weight_N)

    def _bags(self) -> Bags:
        order_N = self._choices.order_N
        position_N = self._local_N
        if position_N is None:
            position_N = torch.arange(order_N.numel(), device=order_N.device)
        return self._choices.bags(position_N)

    def _pad(self, rows_N: torch.Tensor) -> torch.Tensor:
        if self._local_N is None:
            return rows_N
        padded = rows_N.new_zeros((self._num_rows, *rows_N.shape[1:]))
        return padded.index_copy_(0, self._local_N, rows_N)


def local_routing(choices: SortedChoices, placing: Placing) -> Routing:
    """Route within this rank, which holds all experts."""
    return _LocalRouting(choices, placing)


def spread(
    shifts: Sequence[Sequence[int]], lengths: Sequence[int], device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Give each running number of piece p its position: running number plus shift of p."""
    table = torch.tensor([*shifts, lengths], dtype=torch.int64, device=device)
    total = sum(lengths)
    positions = table[:-1].repeat_interleave(table[-1], dim=1, output_size=total)
    positions += torch.arange(total, device=device)
    return positions.unbind(0)


def place(
    value_N: torch.Tensor, local_N: torch.Tensor, placing: Placing, spare: int
) -> torch.Tensor:
    """Bring one value per choice into the order of the local rows; padding rows get `spare`."""
    if placing.is_padded:
        placed = value_N.new_full((placing.num_rows,), spare)
    else:
        placed = value_N.new_empty(placing.num_rows)
    return placed.scatter_(0, local_N, value_N)


def _rounded(x_ND: torch.Tensor, leg: Leg) -> torch.Tensor:
    form = leg.form(x_ND)
    return form.decode(form.encode(x_ND))
