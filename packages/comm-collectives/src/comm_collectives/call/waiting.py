"""What a call that waits long does about ranks that wait for this one elsewhere.

pass_on(call, told)               # now and then; `fall_silent` when it goes on
deny(call, peer, question)        # raises if that peer waits for a transfer of this rank
"""

import json
from collections.abc import Sequence

from comm_collectives.call.frames import Notice
from comm_collectives.call.handles import Awaiting
from comm_collectives.call.pairs import Lane, Question, Questions, WaitId, Waits, read_circle
from comm_collectives.call.settling import Caller
from comm_collectives.errors import MismatchError


def deny(call: Caller, peer: int, question: bytes) -> None:
    """Raise if a peer waits for a transfer of this rank, which does nothing but wait for it.

    Raises:
        MismatchError: so it is, and the peer hears of it.
    """
    own, asked = f"{call}, {call.describe()}", Question.unpack(question)
    theirs = _questions(call).deny(call.state, peer, asked, call.number, own, _awaiting(call))
    if theirs is not None:
        raise MismatchError(f"{call.describe()}, {call}: {theirs}")


def pass_on(call: Caller, told: Sequence[bytes]) -> None:
    """Tell who waits for this rank that it waits as well: not in a backward, which may be served.

    `told` is what those that are missing say of their own waits. First they hear which questions of
    other threads are over.
    """
    state = call.state
    state.prepare()
    if call.backward_of is None and state.moves_on_host:
        at = WaitId(state.global_rank, state.name, -call.number)
        own = Waits(at, f"{call}, {call.describe()}")
        _questions(call).pass_on(state, own, told, _awaiting(call))


def fall_silent(call: Caller) -> None:
    """Take that back."""
    _questions(call).fall_silent(call.state)


def end_circle(call: Caller, notice: Notice) -> None:
    """Let those of a circle know who wait for this rank, if a peer has left the call for one."""
    if notice.circle:
        circle = read_circle(json.loads(notice.circle))
        _questions(call).end(call.state, circle, notice.text)


def _questions(call: Caller) -> Questions:
    return Questions.of(call.state, Lane.of)


def _awaiting(call: Caller) -> Awaiting | None:
    worker = call.state.worker
    return worker.awaiting if worker is not None and worker.is_here() else None
