"""The messages between this rank and others of a group, beside its calls: order, waits, failures.

A send starts at once. What finds no room yet follows while anybody waits here, or by the lane's
helper, a thread that also reads ahead what is expected. Whoever waits for a message reads, without
a change of thread.

Invariants: nobody waits longer than the limit, and what a limit cut short is still there for the
next receive. Two ranks of which each waits for the other, here or in a call, both raise
`MismatchError`, and the group goes on.

    lane = Lane.of(state)
    lane.send("send", [x], dst, limit_s=None).wait()
    message = lane.take(*lane.post("recv", src, limit_s=None))
"""

import struct
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import final
from weakref import ref

import torch

from comm_collectives.call.groups import GroupState
from comm_collectives.call.handles import Worker
from comm_collectives.call.pairs.pair import Message, Pair, Ticket, Word
from comm_collectives.call.pairs.transfer import SendHandle, Transfer
from comm_collectives.call.signature import current_site
from comm_collectives.errors import CommError, MismatchError

_LOOK_S = 0.25  # how often a waiting rank looks whether its peer is still there
_FIRST_TICK_S, _LONGEST_TICK_S = 5e-4, 4e-3  # between two looks of the helper
_OPENING = threading.Lock()
_PATIENCE_S = 0.5  # before a waiting rank asks its peer whether that waits for it in turn
_QUESTION = struct.Struct("<?qqq")  # is it a send, key and place of the message, its own number
_CROSSED = "the two ranks wait for each other"
ANY_RANK = -1


@final
class Lane:
    """The pairs of one group on this rank.

    Attributes:
        users: the threads of the program that made transfers here.
    """

    def __init__(self, state: GroupState) -> None:
        self._streams = streams = state.open_streams("pairs")
        self._clock = state.transport.clock
        self.changed = threading.Condition()
        others = [rank for rank in range(state.size) if rank != state.rank]
        self.pairs = {r: Pair(streams, r, state.transport, self.changed) for r in others}
        self.users: set[int] = set()
        self._workers: dict[tuple[int, str], Worker] = {}
        # A queue that a finaliser may put into.
        self._jobs: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._has_helper, self._is_helped = state.opener is None, False

    @staticmethod
    def of(state: GroupState, *, uses: bool = False) -> "Lane":
        """Return the one lane of a group; `uses`: for a transfer of this thread. Not collective."""
        lane: Lane | None = state.lane
        if lane is None:
            with _OPENING:
                lane = state.lane
                if lane is None:
                    lane = state.lane = Lane(state)
        if uses:
            lane.users.add(threading.get_ident())
        return lane

    def send(
        self,
        state: GroupState,
        name: str,
        tensors: Sequence[torch.Tensor],
        dst: int,
        *,
        limit_s: float | None = None,
        key: int = 0,
        flags: int = 0,
    ) -> SendHandle:
        """Start to send dense tensors, which are kept until they are sent.

        Raises:
            CommError: the peer cannot be reached.
        """
        # What lies on the host travels there, beside whatever backend the group has.
        devices, pair = [x.device for x in tensors], self.pairs[dst]
        kinds = ["cpu" if on.type == "cpu" else state.transport_type(on) for on in devices]
        place, number, works = pair.send(tensors, kinds, key, flags)
        if not pair.is_sent(number):
            self.later(int)
        transfer = Transfer(
            name=name, state=state, src=state.rank, dst=dst, key=key, place=place, limit_s=limit_s
        )

        def finish(transfer: Transfer) -> None:
            self._wait(lambda: pair.is_sent(number), transfer)
            if pair.is_lost(number):
                raise transfer.lost()
            self._heed(transfer)

        return SendHandle(transfer, works, finish, lambda: pair.is_sent(number), tensors)

    def post(
        self,
        state: GroupState,
        name: str,
        src: int,
        *,
        limit_s: float | None = None,
        key: int = 0,
        holds: bool = True,
    ) -> tuple[Ticket, Transfer]:
        """Ask for the next message of a key from a rank, or from any."""
        pairs, ticket = self._pairs_of(src), Ticket(key)
        with self.changed:
            place = pairs[0].place_of_next(key)
            for pair in pairs:
                pair.post(ticket)
        return ticket, Transfer(
            name=name,
            state=state,
            src=src,
            dst=state.rank,
            key=key,
            place=place,
            limit_s=limit_s,
            holds=holds,
        )

    def take(self, ticket: Ticket, transfer: Transfer) -> Message:
        """Wait for a message that was asked for.

        Raises:
            CollectiveTimeoutError: it did not come in time; the next receive gets it.
            PeerFailedError: the peer is gone.
            MismatchError: the peer waits for this rank in its turn.
        """
        try:
            self._wait(lambda: ticket.message is not None, transfer)
        finally:
            if ticket.message is None:
                with self.changed:
                    for pair in self._pairs_of(_peer_of(transfer)):
                        pair.withdraw(ticket)
        if ticket.message is None:
            raise transfer.late()
        return ticket.message

    def refuse(self, message: Message, transfer: Transfer, why: str) -> MismatchError:
        """Return the error for a message of no use, of which its sender hears too."""
        self.pairs[message.source].say(Word.REFUSED, transfer.key, message.place, f"0 0 0\n{why}")
        return MismatchError(f"{transfer}: {why}")

    def deny(self, peer: int, question: bytes, number: int, own: str) -> str | None:
        """Answer a peer that waits for a transfer, while this rank waits for it in `own`.

        None if the transfer may come all the same: it is under way, or another thread makes it.

        Args:
            number: of the call in which this rank is, 0 if it is in a transfer.
        """
        is_send, key, place, asked = _QUESTION.unpack_from(question)
        pair, theirs = self.pairs[peer], question[_QUESTION.size :].decode(errors="replace")
        done = pair.came[key] if is_send else pair.sent[key]
        if done >= place or asked <= pair.over or self.users - {threading.get_ident()}:
            return None
        pair.over = asked
        word = Word.REFUSED if is_send else Word.STUCK
        if is_send:
            pair.void.add((key, place))
        pair.say(word, key, place, f"{number} {pair.asked} {asked}\n{_CROSSED}: {own}")
        self.later(int)
        return f"{_CROSSED}: {theirs}"

    def expect(self, src: int) -> None:
        """Have the next ordinary message of a rank read ahead."""
        with self.changed:
            self.pairs[src].expect(0)
        self.later(int)

    def worker(self, peer: int, direction: str) -> Worker:
        """The thread on which asynchronous transfers to ("to") or from a peer are waited for."""
        key = peer, direction
        if key not in self._workers:
            self._workers[key] = Worker(f"comm_collectives {direction} {peer}", self)
        return self._workers[key]

    def later(self, job: Callable[[], object]) -> None:
        """Have the helper run a job, and what is under way go on meanwhile."""
        if self._has_helper:
            self.open_helper()
            self._jobs.put(job)
        else:
            job()

    def open_helper(self) -> None:
        """Start the helper, so that a finaliser need not."""
        if self._has_helper and not self._is_helped:
            with _OPENING:
                if not self._is_helped:
                    self._is_helped = True
                    weakref.finalize(self, self._jobs.put, None).atexit = False
                    target = (ref(self), self._jobs)
                    threading.Thread(target=_help, args=target, daemon=True).start()

    def help(self) -> bool:
        """Send and read ahead what is possible; whether anything of that is left."""
        is_left = False
        for pair in self.pairs.values():
            with suppress(CommError):  # who waits for it gets the error
                is_left |= not pair.flush()
                if pair.is_expecting and pair.peer not in self._streams.gone():
                    is_left = True
                    self._read([pair], pair.has_expected)
        return is_left

    def _pairs_of(self, rank: int) -> Sequence[Pair]:
        return list(self.pairs.values()) if rank == ANY_RANK else [self.pairs[rank]]

    def _read(self, pairs: Sequence[Pair], enough: Callable[[], bool], wait_s: float = 0.0) -> bool:
        """Read what others do not read already, and wait for more; False if they read all of it."""
        with self.changed:
            own = [pair for pair in pairs if not pair.is_reading]
            for pair in own:
                pair.is_reading = True
            if not own and wait_s and not enough():
                self.changed.wait(wait_s)
        try:
            for pair in own:
                pair.read(enough)
            if own and wait_s and not enough():
                sends = [pair.peer for pair in self.pairs.values() if not pair.flush()]
                self._streams.wait([pair.peer for pair in own], sends, wait_s)
        finally:
            if own:
                with self.changed:
                    for pair in own:
                        pair.is_reading = False
                    self.changed.notify_all()
        return bool(own)

    def _wait(self, is_done: Callable[[], bool], transfer: Transfer) -> None:
        """Send and read until something is done."""
        limit_s = transfer.limit_s or transfer.state.transport.limit_s
        pairs, start_s = self._pairs_of(_peer_of(transfer)), self._clock.now_s()
        now_s, has_asked, has_reached = start_s, False, False
        try:
            while not is_done():
                if now_s >= start_s + limit_s:
                    raise transfer.late()
                self._read(pairs, is_done, min(_LOOK_S, start_s + limit_s - now_s))
                if is_done():
                    return
                self._check_peer(transfer, is_done, pairs)
                self._heed(transfer)
                now_s = self._clock.now_s()
                if not has_reached and now_s - start_s >= _PATIENCE_S and self._holds(transfer):
                    has_asked, has_reached = True, self._ask(transfer, _placed(transfer))
        finally:
            if has_asked:
                self._ask(transfer, "")

    def _holds(self, transfer: Transfer) -> bool:
        """Whether this rank waits for one peer and does nothing else."""
        others = self.users - {threading.get_ident()}
        return transfer.holds and transfer.src != ANY_RANK and not others

    def _ask(self, transfer: Transfer, text: str) -> bool:
        """Tell the peer for what this rank waits; False if it has to be told again, if in a call.

        Another thread may be in a call, or look for a moment whether peers wait in a backward.
        """
        state, peer = transfer.state, transfer.peer
        is_send, pair = transfer.src == state.rank, self.pairs[peer]
        pair.asked += 1
        pair.open = pair.asked if text else 0
        if not is_send:
            own = f"{pair.asked}\n{text}" if text else ""
            pair.say(Word.AWAITED, transfer.key, transfer.place, own)
        if not state.lock.acquire(blocking=False):
            return False
        try:
            question = _QUESTION.pack(is_send, transfer.key, transfer.place, pair.asked)
            state.reach().ask(peer, question + text.encode() if text else b"")
        finally:
            state.lock.release()
        return True

    def _check_peer(
        self, transfer: Transfer, is_done: Callable[[], bool], pairs: Sequence[Pair]
    ) -> None:
        """Raise if the peer is gone, and what it had sent is read."""
        frames = transfer.state.frames
        gone = {*self._streams.gone(), *(() if frames is None else frames.streams.gone())}
        is_gone = gone.issuperset(pair.peer for pair in pairs)
        if is_gone and self._read(pairs, is_done) and not is_done():
            raise transfer.lost()

    def _heed(self, transfer: Transfer) -> None:
        """Raise if the peer has said that this transfer comes to nothing."""
        if transfer.src == ANY_RANK:
            return
        pair = self.pairs[transfer.peer]
        said = pair.said
        word = Word.REFUSED if transfer.src == transfer.state.rank else Word.STUCK
        for one in list(said):
            if (one.word, one.key, one.place) == (word, transfer.key, transfer.place):
                said.remove(one)
                head, _, text = one.text.partition("\n")
                number, asked, answered = map(int, head.split())
                if answered not in (0, pair.open):
                    continue  # of an earlier wait for the same message
                pair.over = max(pair.over, asked)  # the peer has left what it asked for until then
                error = MismatchError(f"{_placed(transfer)}: {text}")
                _leave_call(transfer.state, number, error)
                raise error
        theirs = pair.awaited
        if theirs is not None and transfer.holds and transfer.src == transfer.peer:
            count, _, text = theirs.text.partition("\n")
            question = _QUESTION.pack(False, theirs.key, theirs.place, int(count)) + text.encode()
            why = self.deny(transfer.peer, question, 0, _placed(transfer))
            if why is not None:
                raise MismatchError(f"{_placed(transfer)}: {why}")


def _placed(transfer: Transfer) -> str:
    return f"{transfer} at {current_site().text}"


def _leave_call(state: GroupState, number: int, error: CommError) -> None:
    """Count a call of the peers as one that failed here too, and say so to all of them."""
    if number and state.lock.acquire(blocking=False):
        try:
            state.last_call = max(state.last_call, number)
            state.failed_calls.append(number)
            state.reach().fail(number, type(error).__name__, str(error))
        finally:
            state.lock.release()


def _peer_of(transfer: Transfer) -> int:
    return ANY_RANK if transfer.src == ANY_RANK else transfer.peer


def _help(lane_of: "ref[Lane]", jobs: "SimpleQueue[Callable[[], object] | None]") -> None:
    """Run jobs, and look after what is under way as long as there is any."""
    tick_s: float | None = None
    while True:
        try:
            job = jobs.get(timeout=tick_s)
            if job is None:
                return
            with suppress(CommError):  # the peer, who waits for it, has an error of its own
                job()
            del job  # what it holds must not live until the next one comes
            tick_s = None
        except Empty:
            pass
        lane = lane_of()
        if lane is None:
            return
        is_left = lane.help()
        del lane
        longest_s = min(_LONGEST_TICK_S, 2 * (tick_s or _FIRST_TICK_S))
        tick_s = longest_s if is_left else None
