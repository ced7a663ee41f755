"""Small tensors travel in the message of their header: one message instead of one for each.

The receiver must offer memory before it knows what comes. So both ends keep, for each direction,
how many bytes the first message of a transfer may have, and let it grow alike with what has
travelled; gloo does not mind a message that is shorter than the memory offered. What does not fit
follows in messages of its own, without a copy.

    framing = Framing()
    buffers = framing.pack(header, tensors)          # one end
    header, tensors = framing.unpack(receive)        # the other
"""

import ctypes
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import final

import torch

from comm_collectives.base import as_bytes, bytes_of, dense, from_bytes, num_bytes
from comm_collectives.base.transport import FIRST_WORDS, TransferHeader
from comm_collectives.units import CACHE_LINE_BYTES, WORD_BYTES, round_up

_FIRST_BYTES = 16 << 10
# Above it the copies cost more than the message that they save.
_MOST_BYTES = 512 << 10
_THREE_WORDS = struct.Struct("<3q")


@final
class Framing:
    """One direction between two ranks; the ends call `pack` and `unpack` once for each transfer."""

    def __init__(self) -> None:
        self._capacity = _FIRST_BYTES
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._is_offered = False

    def pack(self, header: TransferHeader, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The messages of a transfer, flat uint8: the first, then those of tensors left out of it.

        What is left out shares memory with the tensors if they are contiguous.
        """
        packed = header.pack()
        places, size = _places(header, self._capacity)
        first = torch.empty(min(size, self._capacity), dtype=torch.uint8, device="cpu")
        base = first.data_ptr()
        # By address: between two products of a pipeline each indexing of a tensor costs as much as
        # copying a hundred kilobytes.
        ctypes.memmove(base, packed, min(len(packed), len(first)))
        messages = [first]
        if len(packed) > len(first):
            rest = bytearray(packed[len(first) :])
            messages.append(torch.frombuffer(rest, dtype=torch.uint8))
        for tensor, kind, place in zip(tensors, header.travels, places, strict=True):
            if not tensor.numel():
                continue
            block = dense(tensor)
            if place is None:
                messages.append(as_bytes(block).to(kind))
            else:
                block = block.cpu()
                ctypes.memmove(base + place, block.data_ptr(), block.nbytes)
        self._grow(header, places)
        return messages

    def unpack(
        self, receive: Callable[[torch.Tensor], None]
    ) -> tuple[TransferHeader, list[torch.Tensor]] | None:
        """Receive a transfer; each tensor in memory of its own. None: what came has no header.

        Args:
            receive: receives the next message into a flat uint8 tensor, or into a part of it.
        """
        first = self.offer()
        receive(first)
        self._is_offered = False
        data = _start_of(first)
        more = TransferHeader.words_to_come(_THREE_WORDS.unpack_from(data))
        if more:
            data = _start_of(first, FIRST_WORDS + more)
            rest = torch.empty((FIRST_WORDS + more) * WORD_BYTES - len(data), dtype=torch.uint8)
            if rest.numel():
                receive(rest)
                data += bytes_of(rest)
        header, _ = TransferHeader.unpack(data)
        if header is None:
            return None
        places, _ = _places(header, self._capacity)
        tensors = []
        kinds = zip(header.dtypes, header.shapes, header.travels, places, strict=True)
        for dtype, shape, kind, place in kinds:
            size = num_bytes(dtype, shape)
            if place is None:
                flat = torch.empty(size, dtype=torch.uint8, device=kind)
                if size:
                    receive(flat)
            else:
                flat = torch.empty(size, dtype=torch.uint8, device="cpu")
                ctypes.memmove(flat.data_ptr(), first.data_ptr() + place, size)
            tensors.append(from_bytes(flat, dtype, shape))
        self._grow(header, places)
        return header, tensors

    def offer(self) -> torch.Tensor:
        """Memory for the next first message, which may be received before `unpack` is called.

        The same each time, as new pages cost more than the copy.
        """
        if self._is_offered:
            return self._buffer
        self._is_offered = True
        if self._buffer.numel() < self._capacity:
            self._buffer = torch.empty(self._capacity, dtype=torch.uint8, device="cpu")
        # So that an earlier header is not taken for one.
        ctypes.memset(self._buffer.data_ptr(), 0, WORD_BYTES)
        return self._buffer

    def _grow(self, header: TransferHeader, places: Sequence[int | None]) -> None:
        if self._capacity == _MOST_BYTES or None not in places:
            return
        _, wanted = _places(header, _MOST_BYTES)
        self._capacity = max(self._capacity, min(wanted, _MOST_BYTES))


def _places(header: TransferHeader, capacity: int) -> tuple[Sequence[int | None], int]:
    """Where each tensor begins in the first message (None: not in it), and that one's bytes."""
    start = round_up(header.num_words * WORD_BYTES, CACHE_LINE_BYTES)
    return _places_from(start, (header.dtypes, header.shapes, header.travels), capacity)


@lru_cache(maxsize=256)
def _places_from(
    start: int,
    kinds: tuple[tuple[torch.dtype, ...], tuple[tuple[int, ...], ...], tuple[str, ...]],
    capacity: int,
) -> tuple[tuple[int | None, ...], int]:
    end = start
    places: list[int | None] = []
    for dtype, shape, kind in zip(*kinds, strict=True):
        after = round_up(end + num_bytes(dtype, shape), CACHE_LINE_BYTES)
        fits = kind == "cpu" and after <= capacity
        places.append(end if fits else None)
        end = after if fits else end
    return tuple(places), end


def _start_of(flat: torch.Tensor, num_words: int = FIRST_WORDS) -> bytes:
    return ctypes.string_at(flat.data_ptr(), min(num_words * WORD_BYTES, flat.numel()))
