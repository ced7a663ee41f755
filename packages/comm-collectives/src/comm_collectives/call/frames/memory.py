"""The bytes of tensors on the host, as frames carry them.

memory_of_each(Pieces(whole, [3, 5]), [3, 5])     # two memoryviews, and no other tensors
"""

import ctypes
from collections.abc import Sequence
from typing import final

import torch

from comm_collectives.errors import CommError

_EMPTY = memoryview(b"")


def memory_of(flat: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the host, writable; keep the tensor meanwhile."""
    return memory_at(flat.data_ptr(), flat.nbytes)


def memory_at(address: int, length: int) -> memoryview:
    """Return bytes in memory, writable, without numpy; keep what they are of meanwhile."""
    if not length:
        return _EMPTY
    if not address:
        raise CommError("a tensor has no memory, as FakeTensors have none; give tensors with data")
    return memoryview((ctypes.c_char * length).from_address(address)).cast("B")


@final
class Pieces(Sequence[torch.Tensor]):
    """Flat uint8 cut by rank into pieces of `sizes`, each a tensor only once it is asked for."""

    def __init__(self, whole: torch.Tensor, sizes: Sequence[int]) -> None:
        if sum(sizes) != whole.numel():
            raise CommError(f"pieces of {sum(sizes)} bytes of a tensor of {whole.numel()}")
        self.whole, self.sizes = whole, sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, rank: int) -> torch.Tensor:  # type: ignore[override]
        start = sum(self.sizes[:rank])
        return self.whole[start : start + self.sizes[rank]]


def sizes_of(flats: Sequence[torch.Tensor]) -> list[int]:
    """Return the bytes of flat uint8 tensors."""
    return [*flats.sizes] if isinstance(flats, Pieces) else [flat.numel() for flat in flats]


def memory_of_each(flats: Sequence[torch.Tensor]) -> tuple[list[memoryview], list[int]]:
    """Return the bytes of flat uint8 tensors, often one and the same or pieces of one, and sizes.

    Rows are handed to no other function here.
    """
    if isinstance(flats, Pieces):
        start, sizes = flats.whole.data_ptr(), [*flats.sizes]
    elif len(set(map(id, flats))) == 1:
        sizes = [flats[0].numel()] * len(flats)
        return [memory_at(flats[0].data_ptr(), sizes[0])] * len(flats), sizes
    else:
        sizes = [flat.numel() for flat in flats]
        addresses = [flat.data_ptr() for flat in flats]  # 0 of empty ones
        start = end = next(filter(None, addresses), 0)
        for address, size in zip(addresses, sizes, strict=True):
            if size and address != end:
                return list(map(memory_at, addresses, sizes)), sizes
            end += size
    whole, at, pieces = memory_at(start, sum(sizes)), 0, []
    for size in sizes:
        pieces.append(whole[at : at + size])
        at += size
    return pieces, sizes
