"""How rows travel: what a row is on the wire, and where rows, weights and numbers stand there.

The messages for all peers, or from them, are one matrix of equally long rows; the format is that of
`planning/wire/wire_format.py`:

    to rank 0: row row row | gap      to rank 1: row row | gap      ...

Legend: P peers, N choices, U rows of tokens, M rows with the gap rows, C columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from comm_collectives.moe.rows import Payload, RowCodec, spread, starts
from comm_collectives.planning.wire import INDEX_BYTES, Movement, Route, RowFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class WireRow:
    """How the rows [N, D] of one movement travel: as their elements, or as bytes of a codec.

    Attributes:
        columns: elements of a row as it travels.
        wire_columns: the same with the room that weights beside it need.
        size: the sizes in bytes.
    """

    movement: Movement
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
        """Return rows [N, D] as they were, but for the rounding."""
        if self.codec is None:
            return rows_NC
        return self.codec.decode(rows_NC, hidden=self.hidden, dtype=self.dtype)


@lru_cache(maxsize=256)
def wire_row(
    movement: Movement, payload: Payload, hidden: int, dtype: torch.dtype, weight_itemsize: int
) -> WireRow:
    """Return how rows travel, with weights of that many bytes beside them."""
    size = RowFormat(
        hidden_size=hidden,
        itemsize=dtype.itemsize,
        weight_itemsize=weight_itemsize,
        block_scaled=payload != "full",
    )
    itemsize = dtype.itemsize if payload == "full" else 1
    return WireRow(
        movement=movement,
        hidden=hidden,
        dtype=dtype,
        codec=None if payload == "full" else RowCodec(payload),
        columns=size.bare_row_bytes // itemsize,
        wire_columns=size.row_bytes_of(movement) // itemsize,
        size=size,
    )


class Messages(NamedTuple):
    """One end of the wire.

    Attributes:
        rows_P: rows and gap rows of each peer's message.
        row_U: where the rows of tokens stand; None if there are no gap rows.
        weight_N: where the weight of each choice stands, in weights.
        number_N: where its row number stands, in int32; None where none travel.
    """

    rows_P: list[int]
    row_U: torch.Tensor | None
    weight_N: torch.Tensor
    number_N: torch.Tensor | None

    def places(self, index_U: torch.Tensor) -> torch.Tensor:
        """Return the row to send in each place; a gap row is a copy of row 0 at first."""
        if self.row_U is None:
            return index_U
        return index_U.new_zeros(sum(self.rows_P)).scatter_(0, self.row_U, index_U)


def plan_messages(
    route: Route,
    form: WireRow,
    rows_P: Sequence[int],
    choices_P: Sequence[int],
    device: torch.device,
) -> Messages:
    """Plan messages with so many rows and choices; the positions are on `device`."""
    size, row_bytes = form.size, form.size.row_bytes
    gaps_P = [size.gap_rows(route, form.movement, n) for n in choices_P]
    whole_P = [u + gap for u, gap in zip(rows_P, gaps_P, strict=True)]
    first_P = starts(whole_P)
    has_numbers = route != "flat" and form.movement == "dispatch"
    if not any(gaps_P):
        nothing = torch.empty(0, dtype=torch.int64, device=device)
        return Messages(whole_P, None, nothing, nothing if has_numbers else None)
    behind_P = [(at + u) * row_bytes for at, u in zip(first_P, rows_P, strict=True)]
    weights_at = [at // size.weight_itemsize for at in behind_P]
    numbers_at = [
        (at + size.numbers_at(n)) // INDEX_BYTES for at, n in zip(behind_P, choices_P, strict=True)
    ]
    if route == "flat":
        row_U, weight_N = spread([first_P, weights_at], rows_P, device)
        return Messages(whole_P, row_U, weight_N, None)
    (row_U,) = spread([first_P], rows_P, device)
    weight_N, number_N = spread([weights_at, numbers_at], choices_P, device)
    return Messages(whole_P, row_U, weight_N, number_N if has_numbers else None)
