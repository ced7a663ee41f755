"""Numbers for each rank, as they are told ahead of rows: `pack_counts([2, 0])`."""

import struct
from collections.abc import Sequence

from comm_collectives.units import WORD_BYTES


def pack_counts(counts: Sequence[int]) -> bytes:
    """Return counts as a part of a frame."""
    return struct.pack(f"<{len(counts)}q", *counts)


def unpack_counts(part: bytes) -> list[int]:
    """Read what `pack_counts` wrote."""
    return list(struct.unpack(f"<{len(part) // WORD_BYTES}q", part))
