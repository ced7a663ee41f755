"""Backwards that a rank still owes the others: what lets an unused output not deadlock a group.

A rank whose loss does not use the output of a collective never runs that collective's backward,
while its peers wait for it there. So each differentiable call leaves behind how to take part in its
backward with a gradient of zeros. It is asked for when the peers are seen waiting in that backward,
and never otherwise.

Invariants: what is kept for one call runs at most once, and a backward that comes after it is an
error instead of a second contribution. A backward is run by all ranks together, in one way or the
other, so between calls all ranks owe the same: `word` is equal on all, and tells who does not.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, final

_KEPT_BACKWARDS = 1024  # older ones are forgotten, on every rank alike


@final
class PendingBackwards:
    """The differentiable calls of one group on this rank whose backward has not run yet."""

    def __init__(self) -> None:
        self._owed: OrderedDict[int, Callable[[Any], None]] = OrderedDict()
        self._dropped: set[int] = set()
        self._served: set[int] = set()
        self.dropped_event = threading.Event()
        # Why gradients of other ranks are wrong since zeros were given here; for the next call.
        self.lost = ""
        # The numbers of `word_of` of all owed calls, combined by xor; travels in frames.
        self.word = 0

    @staticmethod
    def word_of(number: int) -> int:
        """The part of one call in `word`."""
        return hash((number, _KEPT_BACKWARDS))  # the same in every process, for integers

    def add(self, number: int, serve: Callable[[Any], None]) -> None:
        """Keep how to take part with zeros in the backward of call `number`."""
        self._owed[number] = serve
        self.word ^= self.word_of(number)
        while len(self._owed) > _KEPT_BACKWARDS:
            self._remove(next(iter(self._owed)))

    def start(self, number: int) -> bool:
        """Note that the backward of a call runs; False if zeros were already given for it."""
        self._remove(number)
        if number in self._served:
            self._served.discard(number)
            return False
        return True

    def drop(self, number: int) -> None:
        """Note that the graph is gone, so that this rank itself will never run the backward.

        Called by a finaliser, so it takes no lock.
        """
        self._served.discard(number)
        if number in self._owed:
            self._dropped.add(number)
            self.dropped_event.set()

    def owes(self, number: int) -> bool:
        """Whether `take` has something for this call."""
        return number in self._owed

    def __len__(self) -> int:
        return len(self._owed)

    def dropped(self) -> list[int]:
        """Calls whose graph is gone while peers may still ask for their backward."""
        # A copy in one step, since a finaliser may add to it.
        return sorted(number for number in list(self._dropped) if number in self._owed)

    def take(self, number: int) -> Callable[[Any], None]:
        """Return how to take part with zeros, for the one time that it is done."""
        if number not in self._dropped:
            self._served.add(number)
        serve = self._owed[number]
        self._remove(number)
        return serve

    def _remove(self, number: int) -> None:
        if self._owed.pop(number, None) is not None:
            self.word ^= self.word_of(number)
        self._dropped.discard(number)

    def take_lost(self) -> ValueError | None:
        """Return, once, what every rank has to hear about gradients that were lost here."""
        text, self.lost = self.lost, ""
        return ValueError(text) if text else None
