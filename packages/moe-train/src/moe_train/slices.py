"""A few parameters at a time, so that what is copied of them stays small.

for part in slices_of([p.numel() for p in parameters]):
    copies = [p.float() for p in parameters[part]]
"""

from collections.abc import Sequence

SLICE_ELEMENTS = 1 << 24


def slices_of(sizes: Sequence[int], limit: int = SLICE_ELEMENTS) -> list[slice]:
    """Neighbours of together at least `limit`, but for the last ones."""
    found, start, total = [], 0, 0
    for end, size in enumerate(sizes, start=1):
        total += size
        if total >= limit or end == len(sizes):
            found.append(slice(start, end))
            start, total = end, 0
    return found
