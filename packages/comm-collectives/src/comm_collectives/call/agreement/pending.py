"""Backwards that a rank still owes the others: what lets an unused output not deadlock a group.

A rank whose loss does not use the output of a collective never runs its backward, in which its
peers wait. Once its graph is gone it can take part with zeros, the gradient of what nobody uses.

Invariant: zeros are given only for a graph that was dropped untouched. A graph that still lives may
be differentiated later; one of which a part ran, or one that lived when a backward of this rank
ended in an exception, has a gradient that nobody knows. For these all ranks get an error.

    pending.add(7, serve)             # call 7 was made, and its backward is owed
    pending.drop(7)                   # its graph is gone
    pending.stands(7)                 # Standing.JOINS: pending.take(7) says how
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from queue import SimpleQueue
from typing import Any, final

_KEPT_BACKWARDS = 1024  # older ones are forgotten, on every rank alike


class Standing(StrEnum):
    """Where a rank stands towards a backward in which others are; what it tells them."""

    JOINS = "j"  # it is in it too, or its graph is gone and zeros are right
    FAILED = "f"  # a backward of this rank ended in an exception, so it will never come
    TOUCHED = "t"  # a part of the graph ran, and the rest is gone
    HOLDS = "h"  # it may still come, or has run


_REASONS = {
    Standing.FAILED: "a backward pass here ended in an exception ahead of call {}",
    Standing.TOUCHED: "a part of the graph of call {} ran here, and the rest was dropped",
    Standing.HOLDS: "call {} still has its graph here, or had its backward: run backwards in one "
    "order on all ranks, and drop outputs that the loss of a rank does not use",
}


@dataclass(slots=True)
class _Owed:
    """How to take part with zeros in a call's backward, its place, and what became of its graph."""

    serve: Callable[[Any], None]
    order: int
    is_dropped: bool = False
    is_touched: bool = False
    is_failed: bool = False

    @property
    def standing(self) -> Standing:
        if self.is_failed:
            return Standing.FAILED
        if not self.is_dropped:
            return Standing.HOLDS
        return Standing.TOUCHED if self.is_touched else Standing.JOINS


@final
class PendingBackwards:
    """The differentiable calls of one group on this rank whose backward has not run yet.

    `noticed` gets an entry when a graph is gone or a backward failed, so that peers may have to be
    told. Finalisers put it there, which may run anywhere: a queue of this kind alone bears that.
    """

    def __init__(self) -> None:
        self._owed: OrderedDict[int, _Owed] = OrderedDict()
        self.noticed: SimpleQueue[None] = SimpleQueue()
        # Why gradients of other ranks are lost since zeros were given here; for the next call.
        self.lost = ""

    def add(self, number: int, serve: Callable[[Any], None], *, order: int = 0) -> None:
        """Keep how to take part with zeros in the backward of call `number`."""
        self._owed[number] = _Owed(serve, order)
        while len(self._owed) > _KEPT_BACKWARDS:
            self._owed.popitem(last=False)

    def start(self, number: int) -> None:
        """Note that this rank runs the backward of a call."""
        self._owed.pop(number, None)

    def drop(self, number: int) -> None:
        """Note that the graph is gone, so that this rank itself will never run the backward.

        Called by a finaliser, so it takes no lock.
        """
        owed = self._owed.get(number)
        if owed is not None:
            owed.is_dropped = True
            self.noticed.put(None)

    def touch(self, number: int) -> None:
        """Note that a backward ran a part of the graph of a call, but not the call itself."""
        owed = self._owed.get(number)
        if owed is not None:
            owed.is_touched = True

    def fail(self) -> None:
        """Note that a backward of this rank ended in an exception: nothing owed now gets zeros."""
        for owed in list(self._owed.values()):
            owed.is_failed = True
        if self._owed:
            self.noticed.put(None)

    def lives_before(self, order: int) -> bool:
        """Whether a call made before this place among all calls still has its graph."""
        return any(not owed.is_dropped and owed.order < order for owed in list(self._owed.values()))

    def stands(self, number: int) -> Standing:
        """Where this rank stands towards the backward of a call, if it is not in it."""
        owed = self._owed.get(number)
        return Standing.HOLDS if owed is None else owed.standing

    def answerable(self) -> dict[int, bool]:
        """Backwards of which this rank's program need not hear: True where the graph is gone.

        Zeros are right, or the program has had an exception. What a part of ran is not among them.
        """
        settled = (Standing.JOINS, Standing.FAILED)
        owed = list(self._owed.items())
        return {n: each.is_dropped for n, each in owed if each.standing in settled}

    def why(self, numbers: Sequence[int]) -> str:
        """Say what keeps this rank out of backwards in which others are, if anything does."""
        reasons = [(_REASONS.get(self.stands(number)), number) for number in numbers]
        return "; ".join(reason.format(f"{number}") for reason, number in reasons if reason)

    def __len__(self) -> int:
        return len(self._owed)

    def take(self, number: int) -> Callable[[Any], None]:
        """Return how to take part with zeros, for the one time that it is done."""
        return self._owed.pop(number).serve

    def forget(self, numbers: Sequence[int]) -> None:
        """Owe these no more, after all ranks got an error for them."""
        for number in numbers:
            self._owed.pop(number, None)

    def take_lost(self) -> ValueError | None:
        """Return, once, what every rank has to hear about gradients that were lost here."""
        text, self.lost = self.lost, ""
        return ValueError(text) if text else None


def agreed_backward(numbers: Sequence[int], told: Sequence[str]) -> int | None:
    """Return the latest of these calls whose backward all ranks can run, or None.

    Args:
        numbers: calls in whose backward some rank is, ascending.
        told: what each rank told: its `Standing` towards each of them.
    """
    for i in reversed(range(len(numbers))):
        if all(text[i : i + 1] == Standing.JOINS for text in told):
            return numbers[i]
    return None
