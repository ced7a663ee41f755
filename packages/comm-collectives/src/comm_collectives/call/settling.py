"""What follows when the heads of ranks differ: a backward that all join, or one error for all.

Invariant: every rank finds the same from the same heads and the same answers, so none waits for
another afterwards.
"""

from typing import Protocol

from comm_collectives.call.agreement import (
    Comparison,
    Standing,
    agreed_backward,
    compare,
    mismatch_error,
    refused_error,
)
from comm_collectives.call.control import ControlExchange, Exchanged, Waiter
from comm_collectives.call.groups import GroupState
from comm_collectives.call.signature import CallSignature, CallSite, SignatureWords
from comm_collectives.errors import CommError


class Caller(Waiter, Protocol):
    """The call whose head differs; `backward_of` is the call of which it is the backward."""

    state: GroupState
    site: CallSite

    @property
    def backward_of(self) -> int | None:
        """Number of the forward call, None for a forward call."""

    def serve(self, number: int) -> None:
        """Take part with zeros in the backward of another call on behalf of this one."""


def settle(
    call: Caller,
    control: ControlExchange,
    head: CallSignature,
    met: Exchanged,
    refused: Exception | None,
) -> Comparison | None:
    """Compare the heads, and join the backward in which other ranks are, if all can. Collective.

    Returns:
        The comparison, for a call that goes on; None if it has yet to meet, since the ranks met for
        something else. That is a backward which this rank joined with zeros, or one for which all
        ranks but this get an error, since the program of this one has had its own.

    Raises:
        RefusedError, MismatchError: the ranks do not agree.
    """
    comparison = compare([SignatureWords.unpack(theirs) for theirs in met.heads], head)
    awaited, pending, history = comparison.awaited, call.state.pending, call.state.history
    if not awaited and comparison.agrees:
        history.clear()
        return comparison
    own = call.backward_of
    stands = [Standing.JOINS if n == own else pending.stands(n) for n in awaited]
    number = None
    if awaited:
        told = control.tell("".join(stands).encode(), call)
        number = agreed_backward(awaited, [text.decode() for text in told])
    if number is None:
        error = _disagreement(call, control, head, met, comparison, refused)
        pending.forget(awaited)
        if not awaited or set(stands) != {Standing.FAILED}:
            raise error from refused
    history.clear()
    # A rank that takes part is about to meet for its own call: so have all others meet.
    history.compares_next = True
    if number is not None and number == own:
        return comparison
    if number is not None:
        call.serve(number)
    return None


def _disagreement(
    call: Caller,
    control: ControlExchange,
    head: CallSignature,
    met: Exchanged,
    comparison: Comparison,
    refused: Exception | None,
) -> CommError:
    state = call.state
    own = head.describe() if refused is None else f"{refused} (at {call.site.text})"
    others = [number for number in comparison.awaited if number != call.backward_of]
    if others:
        own = f"{own}; {state.pending.why(others)}"
    if comparison.differs_earlier:
        own = state.history.first_difference(lambda text: control.tell(text, call), head.describe())
    state.history.clear()
    texts = [told.decode(errors="replace") for told in control.tell(own.encode(), call)]
    if comparison.differing:
        return mismatch_error(str(call), comparison.differing, texts, state.ranks)
    statuses = [SignatureWords.unpack(theirs).status for theirs in met.heads]
    return refused_error(str(call), statuses, texts, state.ranks)
