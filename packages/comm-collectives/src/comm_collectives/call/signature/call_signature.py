"""What one rank tells all others ahead of a call: its signature, sixteen int64 words.

    status | call number | operation | call site | rolling hash | 11 arguments

Signatures that are equal byte for byte agree. What the words mean is exchanged only when they
differ.
"""

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, final

import torch

from comm_collectives.base import dtype_code
from comm_collectives.call.signature.callsite import CallSite

MAX_ARGUMENTS = 11
_STRUCT = struct.Struct("<16q")
_FIXED_WORDS = 16 - MAX_ARGUMENTS
_OPERATION_WORDS: dict[str, int] = {}
_DTYPE_ARGUMENTS: dict[tuple[str, torch.dtype], "Argument"] = {}


class Status(IntEnum):
    """Bits of what a rank says of its call beside its arguments; may differ between ranks.

    The low 32 bits are told to every rank, or-ed over the ranks. No IntFlag: its & and | are
    ten times slower, and every call has several.
    """

    WANTS_GRAD = 1
    REFUSED = 1 << 32
    REFUSED_TYPE = 1 << 33
    BACKWARD = 1 << 34

    @classmethod
    def of(cls, refused: ValueError | TypeError | None) -> int:
        """Return the status for what is wrong with a rank's arguments."""
        if refused is None:
            return 0
        return cls.REFUSED | cls.REFUSED_TYPE if isinstance(refused, TypeError) else cls.REFUSED


@dataclass(frozen=True, slots=True)
class Argument:
    """One thing on which all ranks of a call must agree: its name, its number, how to print it."""

    name: str
    word: int
    text: str = ""

    def __str__(self) -> str:
        return f"{self.name}={self.text or self.word}"

    @staticmethod
    def of_dtype(dtype: torch.dtype, name: str = "dtype") -> "Argument":
        """Return a dtype."""
        known = _DTYPE_ARGUMENTS.get((name, dtype))
        if known is None:
            text = str(dtype).removeprefix("torch.")
            known = _DTYPE_ARGUMENTS[name, dtype] = Argument(name, dtype_code(dtype), text)
        return known

    @staticmethod
    def of_shape(name: str, shape: Sequence[int]) -> "Argument":
        """Return a shape, or splits."""
        return Argument(name, hash(tuple(shape)), str(tuple(shape)))


class SignatureWords(NamedTuple):
    """A signature as numbers."""

    status: int
    number: int
    operation: int
    site: int
    rolling: int
    arguments: tuple[int, ...]

    @classmethod
    def unpack(cls, data: bytes) -> "SignatureWords":
        """Read what `CallSignature.pack` wrote."""
        words = _STRUCT.unpack_from(data)
        status, number, operation, site, rolling = words[:_FIXED_WORDS]
        return cls(status, number, operation, site, rolling, words[_FIXED_WORDS:])

    @property
    def operation_name(self) -> str:
        """The operation's name, as far as this rank has made such a call itself."""
        names = [name for name, known in _OPERATION_WORDS.items() if known == self.operation]
        return names[0] if names else "another operation"


@final
@dataclass(slots=True, kw_only=True)
class CallSignature:
    """What this rank says of its call.

    `compares_site` is False for calls that a program rightly makes from two places, such as a
    broadcast by its source and by its receivers.
    """

    name: str
    number: int
    site: CallSite
    arguments: Sequence[Argument] = ()
    compares_site: bool = True
    status: int = 0
    rolling: int = 0

    def fingerprint(self, rolling: int) -> int:
        """Return the rolling hash of the calls so far (given) and this one."""
        # The hash of a tuple of integers is the same in every process.
        arguments = [argument.word for argument in self.arguments]
        return hash((rolling, operation_word(self.name), self.site_word, *arguments))

    def describe(self) -> str:
        """Say what the call is, for the other ranks' errors."""
        given = ", ".join(str(argument) for argument in self.arguments)
        return f"{self.name}({given}) at {self.site.text}"

    def pack(self) -> bytes:
        """Return the signature as bytes."""
        words = [argument.word for argument in self.arguments]
        padding = (0,) * (MAX_ARGUMENTS - len(words))
        first = self.status, self.number, operation_word(self.name), self.site_word, self.rolling
        return _STRUCT.pack(*first, *words, *padding)

    @property
    def site_word(self) -> int:
        """The number of the call site as compared."""
        return self.site.word if self.compares_site else 0


def operation_word(name: str) -> int:
    """Return the number under which an operation travels."""
    word = _OPERATION_WORDS.get(name)
    if word is None:
        word = _OPERATION_WORDS[name] = zlib.crc32(name.encode())
    return word
