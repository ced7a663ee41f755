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

import torch

from comm_collectives.wire import DTYPES, dtype_code

FIRST_WORDS = 64
_MAGIC = 0x6D6F65_636F6D6D  # guards against reading another program's message as a header
_FIXED_WORDS = 5
# Flags: the sender waits for a gradient of what it sends; this is such a gradient.
WANTS_GRADIENT = 1
IS_GRADIENT = 2
_WORD = struct.Struct("<q")
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
            dtypes=tuple(t.dtype for t in tensors),
            shapes=tuple(tuple(t.shape) for t in tensors),
            travels=tuple(travels),
            flags=flags,
        )

    @property
    def num_words(self) -> int:
        """Length of `to_words`."""
        return _FIXED_WORDS + sum(3 + len(shape) for shape in self.shapes)

    def to_words(self) -> list[int]:
        """Return the header as integers, without padding."""
        words = [_MAGIC, self.number, 0, len(self.dtypes), self.flags]
        for dtype, shape, kind in zip(self.dtypes, self.shapes, self.travels, strict=True):
            words += [dtype_code(dtype), _KINDS.index(kind), len(shape), *shape]
        words[2] = len(words)
        return words

    def pack(self) -> bytes:
        """Return the header as bytes that tell their own length, to travel in a frame."""
        words = self.to_words()
        return struct.pack(f"<{len(words)}q", *words)

    @classmethod
    def unpack(cls, data: bytes) -> "tuple[TransferHeader | None, bytes]":
        """Return a packed header, None if there is none, and the bytes that come after it."""
        words = [word for (word,) in _WORD.iter_unpack(data[: len(data) // 8 * 8])]
        if len(words) < _FIXED_WORDS or words[0] != _MAGIC:
            return None, data
        return cls.from_words(words), data[words[2] * _WORD.size :]

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
        if words[0] != _MAGIC:
            return None
        dtypes, shapes, travels = [], [], []
        at = _FIXED_WORDS
        for _ in range(words[3]):
            code, kind, ndim = words[at : at + 3]
            dtypes.append(DTYPES[code])
            travels.append(_KINDS[kind])
            shapes.append(tuple(words[at + 3 : at + 3 + ndim]))
            at += 3 + ndim
        return cls(
            number=words[1],
            dtypes=tuple(dtypes),
            shapes=tuple(shapes),
            travels=tuple(travels),
            flags=words[4],
        )
