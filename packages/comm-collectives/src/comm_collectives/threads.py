"""Threads of a program, known by marks that end with them: their numbers are used again.

users = Threads()
users.add()                    # this thread
users.alive() <= {this_thread()}
"""

import threading
from typing import final
from weakref import ref


class _Mark:
    """Lives as long as its thread."""


Thread = ref[_Mark]


class _Here(threading.local):
    """What each thread has of its own."""

    def __init__(self) -> None:
        self.mark = _Mark()
        self.ref = ref(self.mark)


_HERE = _Here()


def this_thread() -> Thread:
    """The mark of this thread, equal to no other's."""
    return _HERE.ref


@final
class Threads:
    """Threads that have done something; those that have ended are none of them any more."""

    def __init__(self) -> None:
        self._marks: set[Thread] = set()

    def add(self) -> None:
        """Add this thread."""
        self._marks.add(this_thread())

    def alive(self) -> set[Thread]:
        """Those that have not ended."""
        marks = self._marks.copy()  # in one step, while other threads add themselves
        ended = {mark for mark in marks if mark() is None}
        self._marks -= ended
        return marks - ended
