"""What is found on fake devices, also in processes that are forked while they are there.

found = Findings()
found.races.append(race)          # in this process, or in a rank that was forked
found.all()                       # one line each, of all processes
"""

import contextlib
import os
import sys
import tempfile
import threading
import weakref
from typing import NamedTuple, TypeVar, final

import torch

T = TypeVar("T")
_HIDDEN = (
    os.path.dirname(__file__),
    os.path.dirname(torch.__file__),
    str(threading.__file__),
    str(contextlib.__file__),
)


class Access(NamedTuple):
    """One use of device memory: when, in the time of its stream, and by which line."""

    stream: int
    time: int
    where: str


class Race(NamedTuple):
    """Two uses of one memory that nothing orders, by kind, with both places."""

    kind: str
    first: str
    second: str


class Sync(NamedTuple):
    """A line that stopped the host until a device was done."""

    kind: str
    where: str


@final
class _Faults(list[T]):
    """Faults of this process; a forked one tells the process that made the list as well."""

    def __init__(self, of: "Findings") -> None:
        super().__init__()
        self._of = of

    def append(self, fault: T, /) -> None:
        super().append(fault)
        self._of.tell(str(fault))


@final
class Findings:
    """Races and other faults."""

    def __init__(self) -> None:
        self._process = os.getpid()
        # One open file for all processes, which have one position in it.
        self._told, name = tempfile.mkstemp(prefix="devicetest-")
        os.remove(name)
        weakref.finalize(self, os.close, self._told)
        self._read = 0
        self.races: _Faults[Race] = _Faults(self)
        self.problems: _Faults[str] = _Faults(self)

    def tell(self, text: str) -> None:
        """Let the process that made this know of a fault, if it is another one."""
        if os.getpid() != self._process:
            line = f"in process {os.getpid()} of {self._process}: {text}".replace("\n", " ")
            os.write(self._told, f"{line}\n".encode())

    def of_forks(self) -> list[str]:
        """Return what forked processes found since the last call of `forget`."""
        told = os.pread(self._told, 1 << 20, self._read)
        return told.decode(errors="replace").splitlines()

    def all(self) -> list[str]:
        """Return all faults, one line each."""
        return [*map(str, self.races), *self.problems, *self.of_forks()]

    def forget(self) -> None:
        """Forget them."""
        self.races.clear()
        self.problems.clear()
        self._read = os.fstat(self._told).st_size


def where() -> str:
    """Return the innermost line that is neither torch's nor this package's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HIDDEN):
        frame = frame.f_back
    code = frame.f_code
    return f"{os.path.basename(code.co_filename)}:{frame.f_lineno} {code.co_name}"
