"""Ranks that wait for each other, in whatever groups: what one that waits long tells the others.

A rank that has waited for a while tells all who wait for it, in any group, for what it waits, and
what it was told of those behind that. One that finds its own wait in what it is told is in a
circle. It says so to the rank before it, which leaves its wait and says so to the one before that,
until it comes round. A transfer is announced by a question, a call by its frame, which is there.

Invariant: a rank tells only who waits for something that it has not done, and only while it waits
itself, with all threads that could do it. So whoever is in a circle can never go on; a rank that is
late, and whoever waits for it, is in none.

    questions = Questions.of(state, Lane.of)
    questions.ask(transfer, text)            # again and again while it waits
    questions.take_back(transfer)
    questions.pass_on(state, own, chains, awaiting)        # likewise in a call
    questions.fall_silent(state)
"""

import itertools
import json
import struct
import threading
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from typing import Any, NamedTuple, final
from weakref import ref

from comm_collectives.call.frames import Kind
from comm_collectives.call.groups import GroupState
from comm_collectives.call.handles import Awaiting
from comm_collectives.call.pairs.pair import Pair, Said, Word
from comm_collectives.call.pairs.spoken_of import SpokenOf
from comm_collectives.call.pairs.transfer import Transfer
from comm_collectives.errors import CommError, MismatchError
from comm_collectives.threads import Thread, Threads, this_thread
from comm_collectives.units import POLL_S

_HEAD = struct.Struct("<?qqq")  # is it a send, key and place of the message, its own number
_NUMBERS = itertools.count(1)
_BEGINNING = threading.Lock()
LOOKS = 20
_CROSSED = "the two ranks wait for each other"


class WaitId(NamedTuple):
    """A wait of a rank (global): question `number` of it in a group, or call -`number`."""

    rank: int
    group: str
    number: int


class Waits(NamedTuple):
    """A rank that waits; `text` says in what."""

    at: WaitId
    text: str


# Each waits for the next.
Chain = tuple[Waits, ...]


class Question(NamedTuple):
    """What a rank wants of this one: a message, or that one is received."""

    is_send: bool
    key: int
    place: int
    number: int
    text: str

    def pack(self) -> bytes:
        """Return it as bytes."""
        return _HEAD.pack(*self[:4]) + self.text.encode()

    @staticmethod
    def unpack(data: bytes) -> "Question":
        """Read what `pack` has written."""
        is_send, key, place, number = _HEAD.unpack_from(data)
        return Question(is_send, key, place, number, data[_HEAD.size :].decode(errors="replace"))


@final
class Questions:
    """Who waits for this rank in one group; answers are queued, for its lane to send.

    Attributes:
        users: the threads of the program that made transfers here.
    """

    def __init__(self, open_lane: Callable[[GroupState], Any]) -> None:
        self._open_lane = open_lane
        self.users = Threads()
        self._asked: int | None = None  # the peer that has the open question
        # Peers whose question is over, which they have not been told: another thread was in a call.
        self._owed: dict[int, ref[GroupState]] = {}
        self._heard: dict[int, Question] = {}  # from ranks that wait for a transfer of this one
        self._ahead: dict[int, int] = {}  # calls in which ranks wait for this one
        self._told: dict[int, tuple[int, Chain]] = {}  # to whom, for which wait, what
        self._spoken_of = SpokenOf()

    @staticmethod
    def of(state: GroupState, open_lane: Callable[[GroupState], Any]) -> "Questions":
        """Return the one of a group; `open_lane` is `Lane.of`."""
        with _BEGINNING:
            if state.questions is None:
                state.questions = Questions(open_lane)
            found: Questions = state.questions
        return found

    def is_blocked(self, awaiting: Awaiting | None) -> bool:
        """Whether no thread that makes transfers here can do any, for those `awaiting` it."""
        return _is_all(awaiting, self.users.alive())

    @property
    def is_owed(self) -> bool:
        """Whether a peer is yet to hear that a question is over."""
        return bool(self._owed)

    def give_back(self) -> bool:
        """Tell peers that questions are over; False if another thread is in a call just now."""
        for peer, of in list(self._owed.items()):
            state = of()
            if state is not None:
                if not state.lock.acquire(blocking=False):
                    return False
                try:
                    if self._owed.pop(peer, None) is not None:
                        state.reach().say(Kind.QUESTION, [peer], b"")
                finally:
                    state.lock.release()
            self._owed.pop(peer, None)
        return True

    def ask(self, transfer: Transfer, text: str) -> None:
        """Tell the peer for what this rank waits, and who waits for it what else they wait for.

        Another thread may be in a call, or look for a moment whether peers wait in a backward; then
        this is for the next time.
        """
        state, pair = transfer.state, self._pair(transfer.state, transfer.peer)
        is_send = transfer.src == state.rank
        if not pair.open or pair.open_place != transfer.place:
            pair.open = pair.asked = next(_NUMBERS)
            pair.open_place, self._asked = transfer.place, None
            if not is_send:
                pair.say(Word.AWAITED, transfer.key, transfer.place, f"{pair.open}\n{text}")
        if self._asked is None and state.lock.acquire(blocking=False):
            question = Question(is_send, transfer.key, transfer.place, pair.open, text)
            try:
                self._owed.pop(transfer.peer, None)  # this one stands in its place
                state.reach().say(Kind.QUESTION, [transfer.peer], question.pack())
                self._asked = transfer.peer
            finally:
                state.lock.release()
        own = Waits(WaitId(state.global_rank, state.name, pair.open), text)
        self.pass_on(state, own, [pair.chain], transfer.awaiting)

    def take_back(self, transfer: Transfer) -> None:
        """Tell the others that this rank waits no longer."""
        state, pair = transfer.state, self._pair(transfer.state, transfer.peer)
        asked, self._asked, pair.open = self._asked, None, 0
        if transfer.src == transfer.peer:
            pair.say(Word.AWAITED, transfer.key, transfer.place, "")
        if asked is not None:
            self._owed[asked] = ref(state)
            self.give_back()  # or the helper, or whoever makes a call here
        self.fall_silent(state)

    def pass_on(
        self, state: GroupState, own: Waits, told: Sequence[bytes], awaiting: Awaiting | None
    ) -> None:
        """Tell who waits for this rank that it waits too, and let a circle end; see the module.

        `told` is what those say for whom it waits.
        """
        is_all = _all_wait(state, awaiting)
        if not is_all and not self.is_blocked(awaiting):
            return
        self._spoken_of.make_known(state)
        chains = [chain for data in told if (chain := _read(data, own.at.number))]
        others = (_without(own.at.rank, chain) for chain in chains)
        chain = own, *max(others, key=len, default=())
        for each in state.siblings() if is_all else [state]:
            questions = Questions.of(each, self._open_lane)
            questions._hear(each)
            questions._tell(each, chain, with_calls=is_all)
        for chain in chains:
            names = [one.at for one in chain]
            if own.at in names:
                # This rank hears of it too, from the one for which it waits.
                circle = own, *chain[: names.index(own.at)]
                self.end(state, [one.at for one in circle], _describe(circle))
                return

    def fall_silent(self, state: GroupState) -> None:
        """Take back what was told, since this rank goes on."""
        for each in state.siblings():
            questions = Questions.of(each, self._open_lane)
            told, questions._told = questions._told, {}
            for peer, (number, _) in told.items():
                questions._say(each, peer, number, ())

    def end(self, state: GroupState, circle: Collection[WaitId], why: str) -> None:
        """Let those of a circle know of it who wait for this rank."""
        for each in state.siblings():
            questions = Questions.of(each, self._open_lane)
            questions._hear(each)
            for peer, at, question in list(questions._waiting(each, with_calls=True)):
                if at not in circle:
                    continue
                if question is None:
                    _leave_call(each, -at.number, MismatchError(why), circle)
                else:
                    questions._answer(each, peer, question, 0, circle, why)

    def deny(
        self,
        state: GroupState,
        peer: int,
        question: Question,
        number: int,
        own: str,
        awaiting: Awaiting | None,
    ) -> str | None:
        """Answer a peer that waits for a transfer, while this rank waits for it in `own`.

        None if the transfer may come all the same: it is under way, or another thread makes it.

        Args:
            number: of the call in which this rank is, 0 if it is in a transfer.
            awaiting: who waits for this thread, if it is none of the program.
        """
        if not self._owes(state, peer, question) or not self.is_blocked(awaiting):
            return None
        self._answer(state, peer, question, number, (), f"{_CROSSED}: {own}")
        return f"{_CROSSED}: {question.text}"

    def awaited(self, said: Said) -> Question:
        """Read the word of a peer that it waits for a message, and does nothing else."""
        number, _, text = said.text.partition("\n")
        return Question(False, said.key, said.place, int(number), text)

    def heed(self, said: Said, transfer: Transfer, text: str) -> MismatchError | None:
        """Return the error for word that a transfer comes to nothing; None if it is out of date."""
        pair = self._pair(transfer.state, transfer.peer)
        number, asked, answered, circle, why = json.loads(said.text)
        if answered != pair.open:
            return None  # of an earlier wait for the same message
        # Before the next line, since in a circle of two this is that peer.
        self.end(transfer.state, read_circle(circle), why)
        pair.over = max(pair.over, asked)  # the peer has left what it asked for until then
        error = MismatchError(f"{text}: {why}")
        _leave_call(transfer.state, number, error)
        return error

    def _pair(self, state: GroupState, peer: int) -> Pair:
        pair: Pair = self._open_lane(state).pairs[peer]
        return pair

    def _owes(self, state: GroupState, peer: int, question: Question) -> bool:
        """Whether a peer still waits for something that this rank has not done."""
        pair, key, place = self._pair(state, peer), question.key, question.place
        done = pair.came[key] if question.is_send else pair.sent[key]
        is_coming = question.is_send and pair.is_receiving(key, place)
        return done < place and question.number > pair.over and not is_coming

    def _hear(self, state: GroupState) -> None:
        """Read who waits for this rank here, unless another thread is in a call."""
        if state.size == 1 or not state.lock.acquire(blocking=False):
            return
        try:
            if state.frames is None and not self._spoken_of.is_known(state):
                return
            asked, ahead = state.reach().waiting()
            self._heard = {peer: Question.unpack(data) for peer, data in asked.items()}
            self._ahead = ahead
        finally:
            state.lock.release()

    def _waiting(
        self, state: GroupState, *, with_calls: bool
    ) -> Iterator[tuple[int, WaitId, Question | None]]:
        """Those who wait here for what this rank has not done; None is for a call."""
        for peer, question in self._heard.items():
            if self._owes(state, peer, question):
                yield peer, WaitId(state.ranks[peer], state.name, question.number), question
        is_busy = state.worker is not None and state.worker.is_busy  # it may yet make the call
        if not with_calls or is_busy or state.pending.answerable() or not state.moves_on_host:
            return
        for peer, number in self._ahead.items():
            if number > state.last_call:
                yield peer, WaitId(state.ranks[peer], state.name, -number), None

    def _tell(self, state: GroupState, chain: Chain, *, with_calls: bool) -> None:
        for peer, at, _ in list(self._waiting(state, with_calls=with_calls)):
            if self._told.get(peer) != (at.number, chain) and self._say(
                state, peer, at.number, chain
            ):
                self._told[peer] = at.number, chain

    def _say(self, state: GroupState, peer: int, number: int, chain: Chain) -> bool:
        """Tell a peer in wait `number` a chain; False if that is for the next time."""
        text = json.dumps((number, chain))
        if number > 0:
            self._pair(state, peer).say(Word.WAITS, 0, 0, text)
            self._open_lane(state).later(int)
            return True
        if not state.lock.acquire(blocking=False):
            return False
        try:
            state.reach().say(Kind.WAITS, [peer], text.encode())
        finally:
            state.lock.release()
        return True

    def _answer(
        self,
        state: GroupState,
        peer: int,
        question: Question,
        number: int,
        circle: Collection[WaitId],
        why: str,
    ) -> None:
        pair, is_send = self._pair(state, peer), question.is_send
        pair.over = question.number
        if is_send:
            pair.void.add((question.key, question.place))
        text = json.dumps((number, pair.asked, question.number, [*circle], why))
        pair.say(Word.REFUSED if is_send else Word.STUCK, question.key, question.place, text)
        self._open_lane(state).later(int)


def read_circle(circle: Sequence[Sequence[Any]]) -> list[WaitId]:
    """Return the waits of a circle that were sent as JSON."""
    return [WaitId(*at) for at in circle]


def _read(data: bytes, number: int) -> Chain:
    """Return the chain that answers wait `number`; empty if it answers another one."""
    if not data:
        return ()
    answered, chain = json.loads(data)
    return tuple(Waits(WaitId(*at), text) for at, text in chain) if answered == number else ()


def _without(rank: int, chain: Chain) -> Chain:
    """Return the chain up to a rank."""
    return tuple(itertools.takewhile(lambda one: one.at.rank != rank, chain))


def _describe(circle: Chain) -> str:
    several = "the two" if len(circle) == 2 else f"{len(circle)}"
    groups = {one.at.group for one in circle}
    texts = [one.text if len(groups) == 1 else f"{one.text} ({one.at.group!r})" for one in circle]
    named = "" if len(groups) == 1 else f" in {len(groups)} groups, whose names stand behind"
    return f"{several} ranks wait for each other{named}: {'; '.join(texts)}"


def _is_all(awaiting: Awaiting | None, users: Set[Thread]) -> bool:
    return users <= {this_thread()} if awaiting is None else awaiting.is_all(users)


def _all_wait(state: GroupState, awaiting: Awaiting | None) -> bool:
    """Whether all threads that ever used a group of this rank wait here, or have ended."""
    users = {thread for each in state.siblings() for thread in each.users.alive()}
    return bool(users) and _is_all(awaiting, users)


def _leave_call(
    state: GroupState, number: int, error: CommError, circle: Collection[WaitId] = ()
) -> None:
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
                    text = json.dumps([*circle]) if circle else ""
                    state.reach().fail(number, type(error).__name__, str(error), text)
            finally:
                state.lock.release()
            return
        if state.last_call >= number:
            return  # another thread of this rank is in that call, and hears of it there
        with changes:  # the lock is held for a moment by who answers for dropped graphs
            changes.wait(POLL_S)
