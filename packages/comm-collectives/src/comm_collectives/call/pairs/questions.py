"""Ranks that wait for each other: what one that waits for a transfer asks, and is answered.

A rank that has waited for a while asks its peer for what it wants, and says who waits for it in
turn, as far as it was asked. One that finds itself among those who wait for it is in a circle. It
says so to the rank before it, which leaves its transfer and says so to the one before that, until
it comes round.

Invariant: a rank passes on only who waits for something that it has not sent, and only while it
waits itself, with all threads that make transfers. So whoever is in a circle can never go on; a
rank that is late, and whoever waits for it, is in none.

    questions.ask(transfer, placed)          # again and again while it waits
    questions.take_back(transfer)
"""

import json
import struct
import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple, final

from comm_collectives.call.groups import GroupState
from comm_collectives.call.handles import Awaiting
from comm_collectives.call.pairs.pair import Pair, Said, Word
from comm_collectives.call.pairs.transfer import Transfer
from comm_collectives.errors import CommError, MismatchError
from comm_collectives.units import POLL_S

_HEAD = struct.Struct("<?qqq")  # is it a send, key and place of the message, its own number
LOOKS = 20
_CROSSED = "the two ranks wait for each other"


class Waits(NamedTuple):
    """A rank in question `number`, which waits for another; `text` says in what."""

    rank: int
    number: int
    awaited: int
    text: str


class Question(NamedTuple):
    """What a rank waits for, and all that wait: itself first, then whoever waits for it."""

    is_send: bool
    key: int
    place: int
    waits: tuple[Waits, ...]

    @property
    def number(self) -> int:
        """Its number among those of the rank that asks."""
        return self.waits[0].number

    @property
    def text(self) -> str:
        """In what that rank waits."""
        return self.waits[0].text

    def pack(self) -> bytes:
        """Return it as bytes."""
        head = _HEAD.pack(self.is_send, self.key, self.place, self.number)
        return head + json.dumps(self.waits).encode()

    @staticmethod
    def unpack(data: bytes) -> "Question":
        """Read what `pack` has written."""
        is_send, key, place, _ = _HEAD.unpack_from(data)
        waits = tuple(Waits(*one) for one in json.loads(data[_HEAD.size :]))
        return Question(is_send, key, place, waits)


@final
class Questions:
    """The questions of one rank and to it; its answers are queued, for the lane to send.

    Attributes:
        users: the threads of the program that made transfers here.
    """

    def __init__(self, pairs: Mapping[int, Pair]) -> None:
        self._pairs = pairs
        self.users: set[int] = set()
        self._asked: Question | None = None  # that is open
        self._heard: dict[int, Question] = {}  # from ranks that wait for this one

    def is_blocked(self, awaiting: Awaiting | None) -> bool:
        """Whether the program can do nothing while this thread waits, for those `awaiting` it."""
        if awaiting is not None:
            return awaiting.is_all(self.users)
        return self.users <= {threading.get_ident()}

    def ask(self, transfer: Transfer, text: str) -> None:
        """Tell the peer for what this rank waits, and who waits for it, as far as that is new.

        Another thread may be in a call, or look for a moment whether peers wait in a backward; then
        this is for the next time.
        """
        state, pair = transfer.state, self._pairs[transfer.peer]
        is_send = transfer.src == state.rank
        if not pair.open:
            pair.asked += 1
            pair.open, self._asked = pair.asked, None
            if not is_send:
                pair.say(Word.AWAITED, transfer.key, transfer.place, f"{pair.open}\n{text}")
        if not state.lock.acquire(blocking=False):
            return
        own = Waits(state.rank, pair.open, transfer.peer, text)
        try:
            frames = state.reach()
            heard = {peer: Question.unpack(data) for peer, data in frames.asked().items()}
            self._heard = {p: question for p, question in heard.items() if self._owes(p, question)}
            others = {one for question in self._heard.values() for one in question.waits}
            waits = own, *sorted(one for one in others if one.rank != state.rank)
            question = Question(is_send, transfer.key, transfer.place, waits)
            if question != self._asked:
                frames.ask(transfer.peer, question.pack())
                self._asked = question
        finally:
            state.lock.release()
        circle = next(filter(None, (_circle(own, q) for q in self._heard.values())), ())
        if circle:
            several = "the two" if len(circle) == 2 else f"{len(circle)}"
            texts = "; ".join(one.text for one in circle)
            # This rank hears of it too, from the one for which it waits.
            self._tell(
                [one.rank for one in circle], f"{several} ranks wait for each other: {texts}"
            )

    def take_back(self, transfer: Transfer) -> None:
        """Tell the peer that this rank waits no longer."""
        state, pair = transfer.state, self._pairs[transfer.peer]
        has_asked, self._asked, self._heard = self._asked, None, {}
        pair.asked += 1
        pair.open = 0
        if transfer.src == transfer.peer:
            pair.say(Word.AWAITED, transfer.key, transfer.place, "")
        if has_asked is not None and state.lock.acquire(blocking=False):
            try:
                state.reach().ask(transfer.peer, b"")
            finally:
                state.lock.release()

    def deny(
        self, peer: int, question: Question, number: int, own: str, awaiting: Awaiting | None
    ) -> str | None:
        """Answer a peer that waits for a transfer, while this rank waits for it in `own`.

        None if the transfer may come all the same: it is under way, or another thread makes it.

        Args:
            number: of the call in which this rank is, 0 if it is in a transfer.
            awaiting: who waits for this thread, if it is none of the program.
        """
        if not self._owes(peer, question) or not self.is_blocked(awaiting):
            return None
        self._answer(peer, question, number, (), f"{_CROSSED}: {own}")
        return f"{_CROSSED}: {question.text}"

    def awaited(self, said: Said, peer: int) -> Question:
        """Read the word of a peer that it waits for a message, and does nothing else."""
        number, _, text = said.text.partition("\n")
        return Question(False, said.key, said.place, (Waits(peer, int(number), -1, text),))

    def heed(self, said: Said, transfer: Transfer, text: str) -> MismatchError | None:
        """Return the error for word that a transfer comes to nothing; None if it is out of date."""
        pair = self._pairs[transfer.peer]
        number, asked, answered, circle, why = json.loads(said.text)
        if answered != pair.open:
            return None  # of an earlier wait for the same message
        self._tell(circle, why)  # before the next line, since in a circle of two this is that peer
        pair.over = max(pair.over, asked)  # the peer has left what it asked for until then
        error = MismatchError(f"{text}: {why}")
        _leave_call(transfer.state, number, error)
        return error

    def _owes(self, peer: int, question: Question) -> bool:
        """Whether a peer still waits for something that this rank has not done."""
        pair = self._pairs[peer]
        done = pair.came[question.key] if question.is_send else pair.sent[question.key]
        return done < question.place and question.number > pair.over

    def _tell(self, circle: Sequence[int], why: str) -> None:
        """Let the rank before this one in a circle know of it."""
        for peer, question in self._heard.items():
            if peer in circle and self._owes(peer, question):
                self._answer(peer, question, 0, circle, why)

    def _answer(
        self, peer: int, question: Question, number: int, circle: Sequence[int], why: str
    ) -> None:
        pair, is_send = self._pairs[peer], question.is_send
        pair.over = question.number
        if is_send:
            pair.void.add((question.key, question.place))
        text = json.dumps((number, pair.asked, question.number, circle, why))
        pair.say(Word.REFUSED if is_send else Word.STUCK, question.key, question.place, text)


def _circle(own: Waits, question: Question) -> tuple[Waits, ...]:
    """Return the ranks from `own` on, each of which waits for the next, the last one for `own`.

    Empty if those who wait in the question do not include it.
    """
    if own not in question.waits:
        return ()
    by_rank = {one.rank: one for one in question.waits}
    circle = [own]
    while circle[-1].awaited in by_rank and by_rank[circle[-1].awaited] not in circle:
        circle.append(by_rank[circle[-1].awaited])
    return tuple(circle) if circle[-1].awaited == own.rank else ()


def _leave_call(state: GroupState, number: int, error: CommError) -> None:
    """Count a call of the peers as one that failed here too, and say so to all of them."""
    if not number:
        return
    changes, known = state.transport.clock.condition(), state.last_call
    for _ in range(LOOKS):
        if state.lock.acquire(blocking=False):
            try:
                if state.last_call == known:
                    state.last_call = max(known, number)
                    state.failed_calls.append(number)
                    state.reach().fail(number, type(error).__name__, str(error))
            finally:
                state.lock.release()
            return
        if state.last_call >= number:
            return  # another thread of this rank is in that call, and hears of it there
        with changes:  # the lock is held for a moment by who answers for dropped graphs
            changes.wait(POLL_S)
