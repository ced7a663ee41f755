"""Read a pickle without running any of it: what it would build, as plain data.

Pickles are programs, and `.bin`, `.pdparams` and DCP's `.metadata` are pickles. This reader knows
the opcodes that their writers use and calls nothing: a function that a pickle names becomes a
`Call`, and only functions on a list may be named. Bytes are not read but told by their place in the
file, so the tensors of a `.pdparams` are byte ranges like any others.

    read_pickle(file, path, allowed=frozenset({"collections.OrderedDict"}))

Invariant: no code of the pickle runs; memory is bounded by the file without its bytes objects.
"""

import struct
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from weight_convert.errors import CorruptFileError

_MAX_TEXT_BYTES = 1 << 20
_ORDERED = "collections.OrderedDict"


@dataclass(frozen=True, slots=True)
class Blob:
    """Bytes: where they stand in the file."""

    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Named:
    """A class or function, named and not imported."""

    name: str


@dataclass(slots=True, eq=False)
class Call:
    """What a function would return: its name, arguments, and the state that is set afterwards."""

    name: str
    args: tuple[Any, ...]
    state: Any = None


@dataclass(frozen=True, slots=True)
class Persistent:
    """What stands outside of the pickle, by its id."""

    key: Any


_MARK = object()


def read_pickle(
    file: BinaryIO, path: Path, *, end: int | None = None, allowed: frozenset[str]
) -> Any:
    """What the pickle at the file's position would build.

    Args:
        file: opened for reading bytes.
        path: what to call it in an error.
        end: where the pickle must have ended; None for the end of the file.
        allowed: full names of functions and classes that may be named.

    Raises:
        CorruptFileError: no pickle, one that is cut short, or one that names anything else.
    """
    if end is None:
        begin = file.tell()
        end = file.seek(0, 2)
        file.seek(begin)
    machine = _Machine(file, path, end, allowed)
    try:
        return machine.run()
    except (IndexError, KeyError, TypeError, ValueError, AttributeError, struct.error) as error:
        if isinstance(error, CorruptFileError):
            raise
        raise CorruptFileError(
            f"{path} is no pickle that can be read: {type(error).__name__} {error} near byte "
            f"{file.tell()}"
        ) from error


@dataclass(slots=True)
class _Machine:
    file: BinaryIO
    path: Path
    end: int
    allowed: frozenset[str]
    stack: list[Any] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)

    def run(self) -> Any:
        while True:
            code = self.take(1)
            if code == b".":
                return self.stack.pop()
            step = _STEPS.get(code)
            if step is None:
                raise CorruptFileError(
                    f"{self.path}: byte {self.file.tell() - 1} is {code!r}, which no pickle of "
                    f"tensors has"
                )
            step(self)

    def take(self, count: int) -> bytes:
        if count > self.end - self.file.tell():
            raise CorruptFileError(f"{self.path} ends inside its pickle; copy it again")
        return self.file.read(count)

    def number(self, form: str) -> int:
        return int(struct.unpack(form, self.take(struct.calcsize(form)))[0])

    def text(self, form: str) -> str:
        size = self.number(form)
        if size > _MAX_TEXT_BYTES:
            raise CorruptFileError(f"{self.path} has a name of {size} bytes")
        return self.take(size).decode("utf-8", "surrogatepass")

    def line(self) -> str:
        found = self.file.readline(_MAX_TEXT_BYTES)
        if not found.endswith(b"\n"):
            raise CorruptFileError(f"{self.path} ends inside its pickle; copy it again")
        return found[:-1].decode()

    def blob(self, form: str) -> None:
        size, begin = self.number(form), self.file.tell()
        if not 0 <= size <= self.end - begin:
            raise CorruptFileError(
                f"{self.path}: {size} bytes are said to stand at byte {begin}, and "
                f"{self.end - begin} do; copy it again"
            )
        self.file.seek(size, 1)
        self.stack.append(Blob(begin, size))

    def marked(self) -> list[Any]:
        place = len(self.stack) - 1
        while self.stack[place] is not _MARK:
            place -= 1
            if place < 0:
                raise CorruptFileError(f"{self.path} is no pickle that can be read: no mark")
        found = self.stack[place + 1 :]
        del self.stack[place:]
        return found

    def name(self, module: str, name: str) -> None:
        full = f"{module}.{name}"
        if full not in self.allowed:
            raise CorruptFileError(
                f"{self.path} is a pickle that names {full} (byte {self.file.tell()}); only "
                f"tensors are read, and nothing is run. If you trust the file, load it with its "
                f"own library and save plain tensors"
            )
        self.stack.append(Named(full))

    def call(self) -> None:
        args, function = self.stack.pop(), self.stack.pop()
        if not isinstance(function, Named) or not isinstance(args, tuple):
            raise CorruptFileError(f"{self.path} calls what is no function")
        self.stack.append({} if function.name == _ORDERED else Call(function.name, args))

    def build(self) -> None:
        state = self.stack.pop()
        if isinstance(self.stack[-1], Call):
            self.stack[-1].state = state

    def set_items(self, pairs: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict) or len(pairs) % 2:
            raise CorruptFileError(f"{self.path} puts items into what is no dict")
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            target[key if isinstance(key, Hashable) else id(key)] = value

    def append(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, list):
            raise CorruptFileError(f"{self.path} appends to what is no list")
        target += values

    def long(self, form: str) -> None:
        size = self.number(form)
        if size > 256:
            raise CorruptFileError(f"{self.path} has a number of {size} bytes")
        self.stack.append(int.from_bytes(self.take(size), "little", signed=True))

    def pop(self, count: int) -> tuple[Any, ...]:
        if len(self.stack) < count:
            raise CorruptFileError(f"{self.path} is no pickle that can be read: the stack is empty")
        found = tuple(self.stack[len(self.stack) - count :])
        del self.stack[len(self.stack) - count :]
        return found


def _pushing(make: Callable[[_Machine], Any]) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(make(machine))


def _remember(machine: _Machine, place: int) -> None:
    machine.memo[place] = machine.stack[-1]


def _stack_global(machine: _Machine) -> None:
    module, name = machine.pop(2)
    if not isinstance(module, str) or not isinstance(name, str):
        raise CorruptFileError(f"{machine.path} names a function that is no text")
    machine.name(module, name)


_STEPS: Mapping[bytes, Callable[[_Machine], Any]] = {
    b"\x80": lambda m: m.take(1),  # PROTO
    b"\x95": lambda m: m.take(8),  # FRAME
    b"(": _pushing(lambda m: _MARK),
    b"0": lambda m: m.stack.pop(),
    b"1": lambda m: m.marked(),
    b"2": _pushing(lambda m: m.stack[-1]),
    b"}": _pushing(lambda m: {}),
    b"]": _pushing(lambda m: []),
    b")": _pushing(lambda m: ()),
    b"N": _pushing(lambda m: None),
    b"\x88": _pushing(lambda m: True),
    b"\x89": _pushing(lambda m: False),
    b"K": _pushing(lambda m: m.number("<B")),
    b"M": _pushing(lambda m: m.number("<H")),
    b"J": _pushing(lambda m: m.number("<i")),
    b"G": _pushing(lambda m: struct.unpack(">d", m.take(8))[0]),
    b"\x8a": lambda m: m.long("<B"),
    b"\x8b": lambda m: m.long("<I"),
    b"X": _pushing(lambda m: m.text("<I")),
    b"\x8c": _pushing(lambda m: m.text("<B")),
    b"\x8d": _pushing(lambda m: m.text("<Q")),
    b"B": lambda m: m.blob("<I"),
    b"C": lambda m: m.blob("<B"),
    b"\x8e": lambda m: m.blob("<Q"),
    b"T": lambda m: m.blob("<i"),
    b"U": lambda m: m.blob("<B"),
    b"t": _pushing(lambda m: tuple(m.marked())),
    b"l": _pushing(lambda m: m.marked()),
    b"\x85": _pushing(lambda m: m.pop(1)),
    b"\x86": _pushing(lambda m: m.pop(2)),
    b"\x87": _pushing(lambda m: m.pop(3)),
    b"q": lambda m: _remember(m, m.number("<B")),
    b"r": lambda m: _remember(m, m.number("<I")),
    b"\x94": lambda m: _remember(m, len(m.memo)),
    b"h": _pushing(lambda m: m.memo[m.number("<B")]),
    b"j": _pushing(lambda m: m.memo[m.number("<I")]),
    b"c": lambda m: m.name(m.line(), m.line()),
    b"\x93": _stack_global,
    b"R": lambda m: m.call(),
    b"\x81": lambda m: m.call(),  # NEWOBJ
    b"b": lambda m: m.build(),
    b"s": lambda m: m.set_items(list(m.pop(2))),
    b"u": lambda m: m.set_items(m.marked()),
    b"a": lambda m: m.append(list(m.pop(1))),
    b"e": lambda m: m.append(m.marked()),
    b"Q": _pushing(lambda m: Persistent(m.stack.pop())),
}
