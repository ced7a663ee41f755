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

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from queue import SimpleQueue
from typing import final
from weakref import ref

import torch

from comm_collectives.base.transport import Pending
from comm_collectives.call.devices import (
    Start,
    launch_transfers,
    refuse_captured,
    refuse_in_one_queue,
)
from comm_collectives.call.groups import GroupState
from comm_collectives.call.handles import Awaiting, Caught, Worker
from comm_collectives.call.pairs.held import Launch
from comm_collectives.call.pairs.helping import FIRST_TICK_S, help_beside, is_told
from comm_collectives.call.pairs.pair import Message, Pair, Ticket, Word
from comm_collectives.call.pairs.questions import LOOKS, Questions
from comm_collectives.call.pairs.transfer import SendHandle, Transfer
from comm_collectives.call.signature import current_site
from comm_collectives.errors import CollectiveTimeoutError, MismatchError

_LOOK_S = 0.25  # how often a waiting rank looks whether its peer is still there
_OPENING = threading.Lock()
_PATIENCE_S = 0.5  # before a waiting rank asks its peer whether that waits for it in turn
_PRESS_S = 0.1  # how often one looks that has asked for what its peer waits
ANY_RANK = -1


@final
class Lane:
    """The pairs of one group on this rank."""

    def __init__(self, state: GroupState) -> None:
        self._streams = streams = state.open_streams("pairs")
        self._clock, self._hire = state.transport.clock, state.hire
        self.changed = self._clock.condition()
        others = [rank for rank in range(state.size) if rank != state.rank]
        self.pairs = {
            r: Pair(streams, r, state.transport, self.changed, _launcher(state)) for r in others
        }
        self.questions = Questions.of(state, Lane.of)
        self._workers: dict[tuple[int, str], Worker] = {}
        # A queue that a finaliser may put into.
        self._jobs: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._is_helped = False

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
            lane.questions.users.add()
            state.users.add()
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
        refuse_captured(name)
        # What lies on the host travels there, beside whatever backend the group has.
        devices, pair = [x.device for x in tensors], self.pairs[dst]
        kinds = ["cpu" if on.type == "cpu" else state.transport_type(on) for on in devices]
        if any(kind != "cpu" for kind in kinds):
            refuse_in_one_queue(name)
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

        return SendHandle(transfer, works, finish, lambda: pair.is_sent(number), tensors)

    def post(
        self,
        state: GroupState,
        name: str,
        src: int,
        *,
        limit_s: float | None = None,
        key: int = 0,
        awaiting: Awaiting | None = None,
    ) -> tuple[Ticket, Transfer]:
        """Ask for the next message of a key from a rank, or from any."""
        refuse_captured(name)
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
            awaiting=awaiting,
        )

    def take(self, ticket: Ticket, transfer: Transfer) -> Message:
        """Wait for a message that was asked for.

        Raises:
            CollectiveTimeoutError: it did not come in time; the next receive gets it.
            PeerFailedError: the peer is gone.
            MismatchError: the peer waits for this rank in its turn.
        """
        try:
            self._wait(lambda: ticket.message is not None, transfer, ticket)
        finally:
            if ticket.message is None or transfer.src == ANY_RANK:  # all pairs have that one
                with self.changed:
                    for pair in self._pairs_of(_peer_of(transfer)):
                        pair.withdraw(ticket)
        if ticket.message is None:
            raise transfer.late()
        try:
            ticket.message.settle()
        except RuntimeError as error:
            raise transfer.explain(error) from error
        return ticket.message

    def expect(self, src: int) -> None:
        """Have the next ordinary message of a rank read ahead."""
        with self.changed:
            self.pairs[src].expect(0)
        self.later(int)

    def worker(self, peer: int, direction: str) -> Worker:
        """The thread on which asynchronous transfers to ("to") or from a peer are waited for."""
        key = peer, direction
        if key not in self._workers:
            name = f"comm_collectives {direction} {peer}"
            self._workers[key] = Worker(name, self) if self._hire is None else self._hire()
        return self._workers[key]

    def later(self, job: Callable[[], object]) -> None:
        """Have the helper run a job, and what is under way go on meanwhile."""
        if self._hire is None:
            self.open_helper()
            self._jobs.put(job)
            return
        self._jobs.put(job)
        worker = self.worker(ANY_RANK, "helper")
        if not worker.is_busy:
            worker.submit(self._help_in_turn)

    def open_helper(self) -> None:
        """Start the helper, so that a finaliser need not."""
        if self._hire is None and not self._is_helped:
            with _OPENING:
                if not self._is_helped:
                    self._is_helped = True
                    weakref.finalize(self, self._jobs.put, None).atexit = False
                    target = (ref(self), self._jobs)
                    threading.Thread(target=help_beside, args=target, daemon=True).start()

    def help(self) -> bool:
        """Send and read ahead what is possible; whether anything of that is left."""
        is_left = self.questions.is_owed and not self.questions.give_back()
        for pair in self.pairs.values():
            with Caught(Exception) as caught:
                is_left |= not pair.flush()
                if not pair.has_expected() and pair.peer not in self._streams.gone():
                    is_left = True
                    self._read([pair], pair.has_expected)
            if is_told(caught):  # such as no memory for it: who waits for it tries again
                with self.changed:
                    pair.is_expecting = False
        return is_left

    def _help_in_turn(self) -> None:
        """As the helper, where this is no thread but a task."""
        tick_s = FIRST_TICK_S
        while True:
            while not self._jobs.empty():
                job = self._jobs.get_nowait()
                if job is not None:
                    with Caught(Exception) as caught:
                        job()
                    is_told(caught)
            if not self.help():
                return
            sends = [pair.peer for pair in self.pairs.values() if not pair.flush()]
            self._streams.wait((), sends, tick_s)
            tick_s = min(_LOOK_S, 2 * tick_s)

    def launch_held(self, limit_s: float) -> None:
        """Wait until the peers let this rank queue what it sends from a device.

        Raises:
            CollectiveTimeoutError: one did not receive it in time.
        """
        until_s = self._clock.now_s() + limit_s
        for pair in self.pairs.values():
            while len(pair.held) and pair.peer not in self._streams.gone():
                if self._clock.now_s() >= until_s:
                    raise CollectiveTimeoutError(
                        f"rank {pair.peer} of the group has not received in {limit_s:g} s what "
                        "this rank sends from its device, ahead of which no call may go there"
                    )
                self._read([pair], lambda held=pair.held: not len(held), _LOOK_S)  # type: ignore[misc]

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

    def _wait(
        self, is_done: Callable[[], bool], transfer: Transfer, ticket: Ticket | None = None
    ) -> None:
        """Send and read until something is done; a `ticket` is that of a receive."""
        limit_s = transfer.limit_s or transfer.state.transport.limit_s
        pairs, start_s = self._pairs_of(_peer_of(transfer)), self._clock.now_s()
        now_s, has_asked = start_s, False
        try:
            while not is_done():
                if now_s >= start_s + limit_s:
                    raise transfer.late()
                look_s = _PRESS_S if has_asked else _LOOK_S
                self._read(pairs, is_done, min(look_s, start_s + limit_s - now_s))
                if is_done():
                    break
                self._check_peer(transfer, is_done, pairs)
                transfer = self._placed_anew(transfer, ticket)
                self._heed(transfer)
                now_s = self._clock.now_s()
                if now_s - start_s >= _PATIENCE_S and self._may_ask(transfer):
                    has_asked = True
                    self.questions.ask(transfer, _placed(transfer))
            if has_asked and transfer.src == transfer.state.rank:
                self._hear_out(transfer)
        finally:
            if has_asked:
                self.questions.take_back(transfer)
                self.later(int)

    def _placed_anew(self, transfer: Transfer, ticket: Ticket | None) -> Transfer:
        """The receive with the place that its message has by now.

        It comes earlier than was thought when the receive was asked for if one before it has left
        without a message: after its limit, with an error, or with another rank's message.
        """
        if ticket is None or transfer.src == ANY_RANK:
            return transfer
        with self.changed:
            place = self.pairs[transfer.peer].place_of(ticket)
        return transfer if place == transfer.place else replace(transfer, place=place)

    def _hear_out(self, transfer: Transfer) -> None:
        """Raise if the peer refused a message and then read it away, which made room to send it.

        What it said left it before it read, so it has come.
        """
        pair = self.pairs[transfer.peer]
        for _ in range(LOOKS):  # until no other thread is about to read it
            if self._read(
                [pair], lambda: pair.has_refused(transfer.key, transfer.place), FIRST_TICK_S
            ):
                break
        self._heed(transfer)

    def _may_ask(self, transfer: Transfer) -> bool:
        """Whether this rank waits for one peer and does nothing else."""
        is_one = transfer.holds and transfer.src != ANY_RANK
        return is_one and self.questions.is_blocked(transfer.awaiting)

    def _check_peer(
        self, transfer: Transfer, is_done: Callable[[], bool], pairs: Sequence[Pair]
    ) -> None:
        """Raise if the peer is gone, and what it had sent is read."""
        frames = transfer.state.frames
        if transfer.state.asks_for_memory:
            frames = None  # ranks that share memory close these streams one after another
        gone = {*self._streams.gone(), *(() if frames is None else frames.streams.gone())}
        is_gone = gone.issuperset(pair.peer for pair in pairs)
        if is_gone and self._read(pairs, is_done) and not is_done():
            raise transfer.lost()

    def _heed(self, transfer: Transfer) -> None:
        """Raise if the peer has said that this transfer comes to nothing."""
        if transfer.src == ANY_RANK:
            return
        pair, said = self.pairs[transfer.peer], self.pairs[transfer.peer].said
        word = Word.REFUSED if transfer.src == transfer.state.rank else Word.STUCK
        for one in list(said):
            if (one.word, one.key, one.place) == (word, transfer.key, transfer.place):
                said.remove(one)
                error = self.questions.heed(one, transfer, _placed(transfer))
                if error is not None:
                    self.later(int)
                    raise error
        if pair.awaited is not None and transfer.src == transfer.peer and transfer.holds:
            question, own = self.questions.awaited(pair.awaited), _placed(transfer)
            why = self.questions.deny(
                transfer.state, transfer.peer, question, 0, own, transfer.awaiting
            )
            if why is not None:
                raise MismatchError(f"{own}: {why}")


def _launcher(state: GroupState) -> Launch:
    """What starts transfers of a group's device, which does not keep the group alive."""
    of = ref(state)

    def launch(what: str, peer: int, start: Start) -> list[Pending]:
        state = of()
        return [] if state is None else launch_transfers(state, what, peer, start)

    return launch


def _placed(transfer: Transfer) -> str:
    return f"{transfer} at {current_site().text}"


def _peer_of(transfer: Transfer) -> int:
    return ANY_RANK if transfer.src == ANY_RANK else transfer.peer
