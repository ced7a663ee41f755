"""The free blocks of one pool and stream, with true best fit in near constant time.

A size falls into one of 32 bins per power of two. A big integer holds one bit per non-empty bin, so
the next larger non-empty bin is two machine-word operations away; inside a bin a sorted list of
(size, address) keys gives the exact best fit. Bins hold few blocks each, which avoids the slow
middle insertion of one long sorted list.

Invariant: `take(size)` returns the block with the smallest (size, address) among all blocks of at
least `size` bytes. The bins are those of Masmano et al., "TLSF: a new dynamic memory allocator for
real-time systems" (2004); unlike TLSF, which settles for good fit, the search inside the first bin
is exact.

>>> free = FreeList()
>>> free.take(512) is None
True
"""

from bisect import bisect_left, insort
from typing import final

from gpu_alloc.core.block import Block

_SUBBIN_BITS = 5
_ADDRESS_BITS = 64
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
    """An ordered set of free blocks; the blocks' sizes must not change while they are inside."""

    __slots__ = ("_bins", "_blocks", "_mask", "total_bytes")

    def __init__(self) -> None:
        self._bins: dict[int, list[int]] = {}
        self._blocks: dict[int, Block] = {}
        self._mask = 0
        self.total_bytes = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, block: Block) -> None:
        """Insert a block that is not inside."""
        size = block.size
        index = bin_index(size)
        key = size << _ADDRESS_BITS | block.ptr
        keys = self._bins.get(index)
        if keys:
            insort(keys, key)
        else:
            if keys is None:
                self._bins[index] = [key]
            else:
                keys.append(key)
            self._mask |= 1 << index
        self._blocks[block.ptr] = block
        self.total_bytes += size

    def remove(self, block: Block) -> None:
        """Take out a block that is inside. Raises KeyError if it is not."""
        del self._blocks[block.ptr]
        index = bin_index(block.size)
        keys = self._bins[index]
        del keys[bisect_left(keys, block.size << _ADDRESS_BITS | block.ptr)]
        if not keys:
            self._mask ^= 1 << index
        self.total_bytes -= block.size

    def take(self, size_bytes: int) -> Block | None:
        """Take out the smallest block of at least `size_bytes` (lowest address among equals), or
        return None.
        """
        index = bin_index(size_bytes)
        keys = self._bins.get(index)
        position = 0
        if keys:
            position = bisect_left(keys, size_bytes << _ADDRESS_BITS)
        if not keys or position == len(keys):
            above = self._mask >> (index + 1)
            if not above:
                return None
            index += (above & -above).bit_length()
            keys = self._bins[index]
            position = 0
        key = keys.pop(position)
        if not keys:
            self._mask ^= 1 << index
        block = self._blocks.pop(key & _ADDRESS_MASK)
        self.total_bytes -= block.size
        return block

    def largest_bytes(self) -> int:
        """Size of the largest block; 0 when there is none."""
        if not self._mask:
            return 0
        return self._bins[self._mask.bit_length() - 1][-1] >> _ADDRESS_BITS

    def entries(self) -> tuple[tuple[int, int], ...]:
        """(address, size) of every block as the bins hold them, for checkers."""
        keys = (key for index in sorted(self._bins) for key in self._bins[index])
        return tuple((key & _ADDRESS_MASK, key >> _ADDRESS_BITS) for key in keys)
