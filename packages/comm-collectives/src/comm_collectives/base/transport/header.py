"""What travels ahead of a list of tensors: a few int64 words, and no pickle that could run code.

Layout: magic, transfer number, number of words, number of tensors, flags; then per tensor its dtype
number, the device kind it travels on, its number of dims and its shape. The first message has a
fixed size, enough for about ten ordinary tensors; longer headers continue in a second message.

    header = TransferHeader.describe([x], number=1, travels=["cpu"])
    assert TransferHeader.from_words(header.to_words()) == header
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from comm_collectives.base import DTYPES, dtype_code

FIRST_WORDS = 64
_MAGIC = 0x6D6F65_636F6D6D  # guards against reading another program's message as a header
_FIXED_WORDS = 5
# Flags: the sender waits for a gradient of what it sends; this is such a gradient.
WANTS_GRADIENT = 1
IS_GRADIENT = 2
_WORD = struct.Struct("<q")
_HEAD = struct.Struct("<qq")  # magic and number
_KINDS = ("cpu", "cuda", "xpu", "mtia", "npu", "hpu", "mps")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferHeader:
    """Number of a transfer, its flags, and dtype, shape and kind of device of each tensor in it."""

    number: int
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]
    travels: tuple[str, ...]
    flags: int = 0

    @classmethod
    def describe(
        cls, tensors: Sequence[torch.Tensor], number: int, travels: Sequence[str], flags: int = 0
    ) -> "TransferHeader":
        """Describe tensors that travel on the given kinds of device."""
        return cls(
            number=number,
            dtypes=tuple([t.dtype for t in tensors]),
            shapes=tuple([tuple(t.shape) for t in tensors]),
            travels=tuple(travels),
            flags=flags,
        )

    @property
    def num_words(self) -> int:
        """Length of `to_words`."""
        return _FIXED_WORDS + sum(3 + len(shape) for shape in self.shapes)

    def to_words(self) -> list[int]:
        """Return the header as integers, without padding."""
        return [_MAGIC, self.number, *_kinds_to_words(self._kinds)]

    def pack(self) -> bytes:
        """Return the header as bytes that tell their own length, to travel in a frame."""
        return _HEAD.pack(_MAGIC, self.number) + _packed_kinds(self._kinds)

    @classmethod
    def unpack(cls, data: bytes) -> "tuple[TransferHeader | None, bytes]":
        """Return a packed header, None if there is none, and the bytes that come after it."""
        if len(data) < _FIXED_WORDS * _WORD.size:
            return None, data
        magic, number = _HEAD.unpack_from(data)
        if magic != _MAGIC:
            return None, data
        (num_words,) = _WORD.unpack_from(data, _HEAD.size)
        end = num_words * _WORD.size
        return cls._of_kinds(number, _unpacked_kinds(data[_HEAD.size : end])), data[end:]

    @property
    def _kinds(self) -> "_Kinds":
        return self.dtypes, self.shapes, self.travels, self.flags

    @classmethod
    def _of_kinds(cls, number: int, kinds: "_Kinds") -> "TransferHeader":
        dtypes, shapes, travels, flags = kinds
        return cls(number=number, dtypes=dtypes, shapes=shapes, travels=travels, flags=flags)

    def __str__(self) -> str:
        kinds = zip(self.dtypes, self.shapes, strict=True)
        return ", ".join(f"{str(d).removeprefix('torch.')}{list(s)}" for d, s in kinds)

    def to_messages(self) -> list[torch.Tensor]:
        """Return one or two int64 messages, of which the first has `FIRST_WORDS` words."""
        words = self.to_words()
        first = words[:FIRST_WORDS] + [0] * (FIRST_WORDS - len(words))
        parts = [first, words[FIRST_WORDS:]]
        # On the host, whatever the program's default device is.
        return [torch.tensor(part, dtype=torch.int64, device="cpu") for part in parts if part]

    @staticmethod
    def words_to_come(first: Sequence[int]) -> int:
        """Return the size of the second message, told by the first; 0 if there is none."""
        return max(0, first[2] - FIRST_WORDS) if first[0] == _MAGIC else 0

    @classmethod
    def from_words(cls, words: Sequence[int]) -> "TransferHeader | None":
        """Read a header; None if the words are not one."""
        return cls._of_kinds(words[1], _kinds_of_words(words[2:])) if words[0] == _MAGIC else None


# What transfers have in common, and most of a pipeline have all of it: dtypes, shapes, kinds of
# device, flags.
_Kinds = tuple[tuple[torch.dtype, ...], tuple[tuple[int, ...], ...], tuple[str, ...], int]


def _kinds_to_words(kinds: _Kinds) -> list[int]:
    dtypes, shapes, travels, flags = kinds
    words = [0, len(dtypes), flags]
    for dtype, shape, kind in zip(dtypes, shapes, travels, strict=True):
        words += [dtype_code(dtype), _KINDS.index(kind), len(shape), *shape]
    words[0] = 2 + len(words)
    return words


def _kinds_of_words(words: Sequence[int]) -> _Kinds:
    dtypes, shapes, travels = [], [], []
    at = 3
    for _ in range(words[1]):
        code, kind, ndim = words[at : at + 3]
        dtypes.append(DTYPES[code])
        travels.append(_KINDS[kind])
        shapes.append(tuple(words[at + 3 : at + 3 + ndim]))
        at += 3 + ndim
    return tuple(dtypes), tuple(shapes), tuple(travels), words[2]


@lru_cache(maxsize=256)
def _packed_kinds(kinds: _Kinds) -> bytes:
    words = _kinds_to_words(kinds)
    return struct.pack(f"<{len(words)}q", *words)


@lru_cache(maxsize=256)
def _unpacked_kinds(data: bytes) -> _Kinds:
    return _kinds_of_words([word for (word,) in _WORD.iter_unpack(data)])
