"""The messages of one hop in one flat buffer, and the sections of each.

The layout is that of `planning/wire/wire_format.py`.

    messages = Messages("dispatch", form.size, rows_P=[3, 0], choices_P=[5, 0])
    flat = torch.empty(messages.num_bytes, dtype=torch.uint8)
    for rows, number in zip(messages.rows(flat, x.dtype), messages.row_numbers(flat), strict=True):
        ...                                            # [3, D] and [5] int32, then empty ones

Legend: P peers; u rows and n choices of one peer.
"""

from collections.abc import Sequence
from typing import final

import torch

from comm_collectives.moe.rows import starts
from comm_collectives.planning.wire import (
    INDEX_BYTES,
    MessageLayout,
    Movement,
    RowFormat,
    message_layout,
)


@final
class Messages:
    """Where each peer's message begins in the buffer, and what it holds."""

    def __init__(
        self,
        movement: Movement,
        size: RowFormat,
        *,
        rows_P: Sequence[int],
        choices_P: Sequence[int],
    ) -> None:
        self._layouts = [
            message_layout("dedup", movement, size, tokens=u, choices=n)
            for u, n in zip(rows_P, choices_P, strict=True)
        ]
        self._choices_P, self._size = choices_P, size
        self.bytes_P = [layout.num_bytes for layout in self._layouts]
        self._first_P = starts(self.bytes_P)

    @property
    def num_bytes(self) -> int:
        """Bytes of all messages."""
        return sum(self.bytes_P)

    def rows(self, flat: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
        """Views [u, columns] of each peer's rows, with the room for whole weights at their end."""
        row_bytes = self._size.row_bytes
        return [
            flat[first : first + layout.num_rows * row_bytes].view(dtype).view(layout.num_rows, -1)
            if layout.num_rows
            else flat.new_empty((0, row_bytes)).view(dtype)
            for first, layout in zip(self._first_P, self._layouts, strict=True)
        ]

    def row_numbers(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views [n] int32: the row of each choice among its peer's rows."""
        return [
            flat[first + layout.index_at :][: n * INDEX_BYTES].view(torch.int32)
            for first, layout, n in self._pieces()
        ]

    def weights(self, flat: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
        """Views [n] of the weights."""
        return [
            flat[first + layout.weights_at :][: n * dtype.itemsize].view(dtype)
            for first, layout, n in self._pieces()
        ]

    def _pieces(self) -> "zip[tuple[int, MessageLayout, int]]":
        return zip(self._first_P, self._layouts, self._choices_P, strict=True)
