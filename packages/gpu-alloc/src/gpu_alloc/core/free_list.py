"""The places free for one stream of a pool, with true best fit in near constant time.

A place is a free block, or one together with the unused memory before it (see `pool.py`), so it is
kept as address and size beside its block.

A size falls into one of 32 bins per power of two. A big integer holds one bit per non-empty bin, so
the next larger non-empty bin is two machine-word operations away; inside a bin a sorted list of
(size, address) keys gives the exact best fit. Bins hold few blocks each, which avoids the slow
middle insertion of one long sorted list.

Invariant: `find(size)` gives the smallest (size, address) among all places of at least `size`
bytes. The bins are those of Masmano et al., "TLSF: a new dynamic memory allocator for
real-time systems" (2004); unlike TLSF, which settles for good fit, the search inside the first bin
is exact.

>>> FreeList().find(512)
0
"""

from bisect import bisect_left, insort
from typing import final

from gpu_alloc.core.block import Block

_SUBBIN_BITS = 5
_ADDRESS_BITS = 96  # a chunk's number above 44 bits of offset
_ADDRESS_MASK = (1 << _ADDRESS_BITS) - 1


def bin_index(size_bytes: int) -> int:
    """Bin of a positive size; larger sizes never have smaller bins, and a bin spans at most 1/32 of
    its size.
    """
    shift = size_bytes.bit_length() - _SUBBIN_BITS - 1
    if shift <= 0:
        return size_bytes
    return (shift << _SUBBIN_BITS) + (size_bytes >> shift)


@final
class FreeList:
    """An ordered set of free places, each known by its address."""

    __slots__ = ("_bins", "_blocks", "_mask", "total_bytes")

    def __init__(self) -> None:
        self._bins: dict[int, list[int]] = {}
        self._blocks: dict[int, Block] = {}
        self._mask = 0
        self.total_bytes = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, ptr: int, size: int, block: Block) -> None:
        """Insert the place of `size` bytes at `ptr`, which is not inside, under its `block`."""
        index = bin_index(size)
        key = size << _ADDRESS_BITS | ptr
        keys = self._bins.get(index)
        if keys:
            insort(keys, key)
        else:
            if keys is None:
                self._bins[index] = [key]
            else:
                keys.append(key)
            self._mask |= 1 << index
        self._blocks[ptr] = block
        self.total_bytes += size

    def remove(self, ptr: int, size: int) -> Block:
        """Take out the place of `size` bytes at `ptr`. Raises KeyError if it is not inside."""
        block = self._blocks.pop(ptr)
        index = bin_index(size)
        keys = self._bins[index]
        del keys[bisect_left(keys, size << _ADDRESS_BITS | ptr)]
        if not keys:
            self._mask ^= 1 << index
        self.total_bytes -= size
        return block

    def find(self, size_bytes: int) -> int:
        """The key of the smallest place of at least `size_bytes` (lowest place among equals), or
        0. Keys order as (size, address) does; `block_of` has the block.
        """
        index = bin_index(size_bytes)
        keys = self._bins.get(index)
        if keys:
            position = bisect_left(keys, size_bytes << _ADDRESS_BITS)
            if position < len(keys):
                return keys[position]
        above = self._mask >> (index + 1)
        if not above:
            return 0
        return self._bins[index + (above & -above).bit_length()][0]

    def block_of(self, key: int) -> Block:
        """The block of a place inside, by the key that `find` gave."""
        return self._blocks[key & _ADDRESS_MASK]

    def largest_bytes(self) -> int:
        """Size of the largest place; 0 when there is none."""
        if not self._mask:
            return 0
        return self._bins[self._mask.bit_length() - 1][-1] >> _ADDRESS_BITS

    def entries(self) -> tuple[tuple[int, int], ...]:
        """(address, size) of every place as the bins hold them, for checkers."""
        keys = (key for index in sorted(self._bins) for key in self._bins[index])
        return tuple((key & _ADDRESS_MASK, key >> _ADDRESS_BITS) for key in keys)
