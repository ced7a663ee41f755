"""The k numbers of largest magnitude among many that are never held at once.

    rank = find_rank(chunks, 1000)
    rank.above(chunk)        # which of the next chunk are among the 1000

The bits of a float32 without its sign order as its magnitude does, so two counts, of the upper and
then of the lower half of the bits, give the exact bound. Of equal numbers the first ones count.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

_HALF = 16


@dataclass(slots=True, kw_only=True)
class Rank:
    """Those above `bits`, and as many of those equal to it as are left."""

    bits: int
    equal_left: int

    def above(self, values: torch.Tensor) -> torch.Tensor:
        """Which of these are among the largest; chunks are asked in order, each once."""
        magnitudes = _magnitude_bits(values)
        found = magnitudes > self.bits
        if self.equal_left:
            equal = magnitudes == self.bits
            taken = equal & (equal.cumsum(0) <= self.equal_left)
            self.equal_left -= int(taken.sum())
            found |= taken
        return found


def find_rank(chunks: Callable[[], Iterator[torch.Tensor]], count: int) -> Rank:
    """The rank of the `count` largest of all numbers; `chunks` gives them anew at each call."""
    if not count:
        return Rank(bits=2**31 - 1, equal_left=0)
    upper = torch.zeros(1 << (31 - _HALF), dtype=torch.int64)
    for values in chunks():
        upper += torch.bincount(_magnitude_bits(values) >> _HALF, minlength=len(upper))
    high, left = _place(upper, count)
    lower = torch.zeros(1 << _HALF, dtype=torch.int64)
    for values in chunks():
        magnitudes = _magnitude_bits(values)
        inside = magnitudes[(magnitudes >> _HALF) == high] & ((1 << _HALF) - 1)
        lower += torch.bincount(inside, minlength=len(lower))
    low, left = _place(lower, left)
    return Rank(bits=(high << _HALF) | low, equal_left=left)


def _place(counts: torch.Tensor, wanted: int) -> tuple[int, int]:
    """The bin in which the wanted-th largest is, and how many of that bin are wanted."""
    above = counts.flip(0).cumsum(0)
    position = int(torch.searchsorted(above, wanted))
    before = int(above[position - 1]) if position else 0
    return len(counts) - 1 - position, wanted - before


def _magnitude_bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.int32) & 0x7FFFFFFF
