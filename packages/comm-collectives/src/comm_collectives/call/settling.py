"""What follows when the heads of ranks differ: a backward that all join, or one error for all.

Invariant: every rank finds the same from the same heads and the same answers, so none waits for
another afterwards.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

from comm_collectives.call.agreement import (
    Comparison,
    Standing,
    agreed_backward,
    mismatch_error,
    refused_error,
)
from comm_collectives.call.frames import Frames, Waiter
from comm_collectives.call.groups import GroupState
from comm_collectives.call.signature import CallSite, SignatureWords
from comm_collectives.errors import CommError


class Caller(Waiter, Protocol):
    """The call whose head differs; `backward_of` is the call of which it is the backward."""

    state: GroupState
    site: CallSite

    @property
    def backward_of(self) -> int | None:
        """Number of the forward call, None for a forward call."""

    def describe(self) -> str:
        """Say what the call is, for the other ranks' errors."""

    def serve(self, number: int) -> None:
        """Take part with zeros in the backward of another call on behalf of this one."""


def settle(
    call: Caller,
    frames: Frames,
    comparison: Comparison,
    words: Mapping[int, SignatureWords],
    refused: ValueError | TypeError | None,
) -> Comparison | None:
    """Join the backward in which other ranks are, if all can; else all get an error. Collective.

    `words` are the heads by rank.

    Returns:
        The comparison, for a backward that goes on with those who now take part in it; None if the
        call has yet to meet, since the ranks met for something else. That is a backward which this
        rank joined with zeros, or one for which all ranks but this get an error, since the program
        of this one has had its own.

    Raises:
        RefusedError, MismatchError: the ranks do not agree.
    """

    def tell(text: bytes) -> list[bytes]:
        told = frames.tell(text, call)
        return [text if r == state.rank else told[r] for r in range(state.size)]

    state, awaited = call.state, comparison.awaited
    pending, history = state.pending, state.history
    own = call.backward_of
    stands = [Standing.JOINS if n == own else pending.stands(n) for n in awaited]
    number = None
    if awaited:
        told = tell("".join(stands).encode())
        number = agreed_backward(awaited, [text.decode() for text in told])
    if number is None:
        error = _disagreement(call, tell, comparison, words, refused)
        pending.forget(awaited)
        # All ranks leave their calls, and have the next one under the same number.
        state.last_call = max(head.number for head in words.values())
        frames.settle(state.last_call)
        # A rank that stays in its call is about to meet for it again: so have all others meet.
        history.compares_next = True
        if not awaited or set(stands) != {Standing.FAILED}:
            raise error from refused
        # The others count this failure, for which the program of this rank has had its own error.
        state.failed_calls.append(call.number)
    history.clear()
    history.compares_next = True  # as above: a rank that takes part is in a call of its own
    if number is not None and number == own:
        return comparison
    if number is not None:
        call.serve(number)
    return None


def _disagreement(
    call: Caller,
    tell: Callable[[bytes], list[bytes]],
    comparison: Comparison,
    words: Mapping[int, SignatureWords],
    refused: ValueError | TypeError | None,
) -> CommError:
    state = call.state
    own = call.describe() if refused is None else f"{refused} (at {call.site.text})"
    others = [number for number in comparison.awaited if number != call.backward_of]
    if others:
        own = f"{own}; {state.pending.why(others)}"
    if comparison.differs_earlier:
        own = state.history.first_difference(tell, call.describe())
    state.history.clear()
    texts = [told.decode(errors="replace") for told in tell(own.encode())]
    if comparison.differing:
        return mismatch_error(str(call), comparison.differing, texts, state.ranks)
    statuses = [words[rank].status for rank in sorted(words)]
    return refused_error(str(call), statuses, texts, state.ranks)
