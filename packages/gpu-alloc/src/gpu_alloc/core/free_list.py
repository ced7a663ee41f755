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
_SHIFTLESS_BITS = _SUBBIN_BITS + 1  # sizes of so many bits are bins of their own
_ADDRESS_BITS = 96  # a chunk's number above 44 bits of offset
ADDRESS_MASK = (1 << _ADDRESS_BITS) - 1


def bin_index(size_bytes: int) -> int:
    """Bin of a positive size; larger sizes never have smaller bins, and a bin spans at most 1/32 of
    its size.
    """
    shift = size_bytes.bit_length() - _SHIFTLESS_BITS
    if shift <= 0:
        return size_bytes
    return (shift << _SUBBIN_BITS) + (size_bytes >> shift)


@final
class FreeList:
    """An ordered set of free places, each known by its address; `blocks` has their blocks."""

    __slots__ = ("_bins", "_mask", "blocks", "total_bytes")

    def __init__(self) -> None:
        self._bins: dict[int, list[int]] = {}
        self.blocks: dict[int, Block] = {}  # of each place, by its address
        self._mask = 0
        self.total_bytes = 0

    def __len__(self) -> int:
        return len(self.blocks)

    def add(self, ptr: int, size: int, block: Block) -> None:
        """Insert the place of `size` bytes at `ptr`, which is not inside, under its `block`."""
        # `bin_index`, written out here and below: each call costs a tenth of an allocation.
        shift = size.bit_length() - _SHIFTLESS_BITS
        index = size if shift <= 0 else (shift << _SUBBIN_BITS) + (size >> shift)
        keys = self._bins.get(index)
        if keys:
            insort(keys, size << _ADDRESS_BITS | ptr)
        else:
            if keys is None:
                self._bins[index] = [size << _ADDRESS_BITS | ptr]
            else:
                keys.append(size << _ADDRESS_BITS | ptr)
            self._mask |= 1 << index
        self.blocks[ptr] = block
        self.total_bytes += size

    def remove(self, ptr: int, size: int) -> Block:
        """Take out the place of `size` bytes at `ptr`. Raises KeyError if it is not inside."""
        block = self.blocks.pop(ptr)
        shift = size.bit_length() - _SHIFTLESS_BITS
        index = size if shift <= 0 else (shift << _SUBBIN_BITS) + (size >> shift)
        keys = self._bins[index]
        if len(keys) == 1:
            keys.clear()
            self._mask ^= 1 << index
        else:
            del keys[bisect_left(keys, size << _ADDRESS_BITS | ptr)]
        self.total_bytes -= size
        return block

    def resize(self, ptr: int, old_size: int, size: int) -> None:
        """Change the size of the place at `ptr`, which is inside with `old_size`."""
        self.total_bytes += size - old_size
        shift = old_size.bit_length() - _SHIFTLESS_BITS
        old_index = old_size if shift <= 0 else (shift << _SUBBIN_BITS) + (old_size >> shift)
        shift = size.bit_length() - _SHIFTLESS_BITS
        index = size if shift <= 0 else (shift << _SUBBIN_BITS) + (size >> shift)
        bins, key = self._bins, size << _ADDRESS_BITS | ptr
        keys = bins[old_index]
        if len(keys) == 1:
            if index == old_index:
                keys[0] = key
                return
            keys.clear()
            self._mask ^= 1 << old_index
        else:
            del keys[bisect_left(keys, old_size << _ADDRESS_BITS | ptr)]
        found = bins.get(index)
        if found:
            insort(found, key)
        else:
            if found is None:
                bins[index] = [key]
            else:
                found.append(key)
            self._mask |= 1 << index

    def find(self, size_bytes: int) -> int:
        """The key of the smallest place of at least `size_bytes` (lowest place among equals), or
        0. Keys order as (size, address) does; `& ADDRESS_MASK` gives the address.
        """
        index, bins = bin_index(size_bytes), self._bins
        keys = bins.get(index)
        if keys:
            position = bisect_left(keys, size_bytes << _ADDRESS_BITS)
            if position < len(keys):
                return keys[position]
        above = self._mask >> (index + 1)
        return bins[index + (above & -above).bit_length()][0] if above else 0

    def largest_bytes(self) -> int:
        """Size of the largest place; 0 when there is none."""
        if not self._mask:
            return 0
        return self._bins[self._mask.bit_length() - 1][-1] >> _ADDRESS_BITS

    def entries(self) -> tuple[tuple[int, int], ...]:
        """(address, size) of every place as the bins hold them, for checkers."""
        keys = (key for index in sorted(self._bins) for key in self._bins[index])
        return tuple((key & ADDRESS_MASK, key >> _ADDRESS_BITS) for key in keys)
