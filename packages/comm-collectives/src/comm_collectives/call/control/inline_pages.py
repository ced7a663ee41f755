"""Room for payloads too large for a mailbox slot: each rank shows one page per exchange.

What the ranks of a host show each other in the control exchange itself needs no exchange of its
own, so the comparison of a call costs nothing there. As on the mailbox, two pages of a rank
alternate: a rank writes over one only in a control exchange to which all came after they had read
it. A rank that gave up a control exchange may write earlier than that; `MailboxExchange.read`
notices.

    pages = Sheets.open(rank, size, all_gather)      # None: not enough memory is shared
    pages.show(number, flat)                       # while the slot of the mailbox is being written
    pages.of(number)[2]                              # what rank 2 showed
"""

from collections.abc import Callable
from typing import final

import torch

from comm_collectives.base.transport import Region

PAGE_BYTES = 1 << 19
_LEAVE_FREE = 7  # times what is taken: the memory that is shared also serves data loaders


@final
class InlinePages:
    """The pages of all ranks of a group as one of them sees them; each has `page_bytes`."""

    def __init__(self, memory: torch.Tensor, rank: int, size: int) -> None:
        self.page_bytes = memory.numel() // (2 * size)
        self._slots = memory[: 2 * size * self.page_bytes].view(2, size, self.page_bytes)
        self._own = self._slots[:, rank]

    @staticmethod
    def open(
        rank: int, size: int, all_gather: Callable[[bytes], list[bytes]]
    ) -> "InlinePages | None":
        """Open the pages of a group, or None on every rank. Collective; see `Region.open`.

        Raises:
            CommError: whatever `all_gather` raises.
        """
        num_bytes = InlinePages.num_bytes(size)
        spare_bytes = _LEAVE_FREE * num_bytes
        region = Region.open(rank, size, num_bytes, all_gather, spare_bytes=spare_bytes)
        if region is None:
            return None
        # The tensor keeps the memory; who is dead, the mailbox knows.
        memory = region.tensor
        region.close()
        return InlinePages(memory, rank, size)

    @staticmethod
    def num_bytes(size: int, page_bytes: int = PAGE_BYTES) -> int:
        """Return how much memory the pages of `size` ranks need."""
        return 2 * size * page_bytes

    def show(self, number: int, flat: torch.Tensor) -> None:
        """Write flat uint8 of at most `page_bytes` on the own page of control exchange `number`."""
        self._own[number & 1, : flat.numel()].copy_(flat)

    def of(self, number: int) -> torch.Tensor:
        """Return [ranks, page_bytes] uint8: the pages of exchange `number`, to read at once."""
        return self._slots[number & 1]
