"""Room beside a board for what is too large for a frame: each rank shows one sheet per meeting.

What the ranks of a host show each other in the meeting itself needs no exchange of its own, so the
comparison of a call costs nothing there. As on the board, two sheets of a rank alternate: a rank
writes over one only in a meeting to which all came after they had read it. A rank that gave up a
meeting may write earlier than that; `BoardMeeting.read` notices.

    sheets = Sheets.open(rank, size, all_gather)      # None: not enough memory is shared
    sheets.show(number, flat)                         # while the slot of the board is being written
    sheets.of(number)[2]                              # what rank 2 showed
"""

from collections.abc import Callable
from typing import final

import torch

from comm_collectives.base.transport import Region

SHEET_BYTES = 1 << 19
_LEAVE_FREE = 7  # times what is taken: the memory that is shared also serves data loaders


@final
class Sheets:
    """The sheets of all ranks of a group as one of them sees them; each has `sheet_bytes`."""

    __slots__ = ("_own", "_slots", "sheet_bytes")

    def __init__(self, memory: torch.Tensor, rank: int, size: int) -> None:
        self.sheet_bytes = memory.numel() // (2 * size)
        self._slots = memory[: 2 * size * self.sheet_bytes].view(2, size, self.sheet_bytes)
        self._own = self._slots[:, rank]

    @staticmethod
    def open(rank: int, size: int, all_gather: Callable[[bytes], list[bytes]]) -> "Sheets | None":
        """Open the sheets of a group, or None on every rank. Collective; see `Region.open`.

        Raises:
            CommError: whatever `all_gather` raises.
        """
        num_bytes = Sheets.num_bytes(size)
        spare_bytes = _LEAVE_FREE * num_bytes
        region = Region.open(rank, size, num_bytes, all_gather, spare_bytes=spare_bytes)
        if region is None:
            return None
        # The tensor keeps the memory; who is dead, the board knows.
        memory = region.tensor
        region.close()
        return Sheets(memory, rank, size)

    @staticmethod
    def num_bytes(size: int, sheet_bytes: int = SHEET_BYTES) -> int:
        """Return how much memory the sheets of `size` ranks need."""
        return 2 * size * sheet_bytes

    def show(self, number: int, flat: torch.Tensor) -> None:
        """Write flat uint8 of at most `sheet_bytes` on the own sheet of meeting `number`."""
        self._own[number & 1, : flat.numel()].copy_(flat)

    def of(self, number: int) -> torch.Tensor:
        """Return [ranks, sheet_bytes] uint8: the sheets of meeting `number`, to read at once."""
        return self._slots[number & 1]
