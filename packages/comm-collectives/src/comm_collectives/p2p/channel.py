"""Messages between two ranks: in order on the wire, taken by what they are.

Gradients of what was sent come back over the same wire as other transfers of that direction, at a
time that the autograd engine chooses. So whoever waits for one message reads the wire and keeps
what is meant for others; every message says in its header what it is. Nothing here uses the control
exchange of a group or its lock: only two of its ranks are involved.

    channel = Channel.of(state, peer)
    works, buffers = channel.send([x], transfer)
    message = channel.take(transfer)              # transfers of one direction come in order
    gradient = channel.take(transfer, gradient=True)
"""

import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from queue import SimpleQueue
from typing import TypeVar, final

import torch

from comm_collectives.base import as_bytes, dense, from_bytes, num_bytes
from comm_collectives.base.transport import FIRST_WORDS, IS_GRADIENT, Pending, TransferHeader
from comm_collectives.call import classify, first_line, wait_for
from comm_collectives.call.groups import GroupState
from comm_collectives.call.handles import Handle, Worker, launch_on
from comm_collectives.errors import CommError, MismatchError
from comm_collectives.p2p.eager import Framing

T = TypeVar("T")
_TRANSFERS = 0  # under which ordinary transfers are kept; gradients are under their number, from 1
_FOREVER = timedelta(days=365)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One numbered transfer from `src` to `dst` (ranks inside the group), or its gradient."""

    name: str
    state: GroupState
    src: int
    dst: int
    number: int
    limit_s: float | None

    def renamed(self, name: str) -> "Transfer":
        """Return the same transfer as part of another call."""
        return replace(self, name=name)

    @property
    def peer(self) -> int:
        """The other rank, inside the group."""
        return self.src if self.dst == self.state.rank else self.dst

    def wait(self, work: Pending) -> None:
        """Wait for a message of it; CommError if that fails."""
        try:
            wait_for(work, self.limit_s)
        except RuntimeError as error:
            raise self.explain(error) from error

    def explain(self, error: RuntimeError) -> CommError:
        """Return the error for a message that failed."""
        kind, what = classify(error, self.limit_s)
        peer = self.state.ranks[self.peer]
        missing = "" if kind is CommError else f"; rank {peer} did not do its part"
        return kind(f"{self} {what}{missing}. Cause: {first_line(error)}")

    def __str__(self) -> str:
        ranks = self.state.ranks
        return (
            f"rank {self.state.global_rank}: {self.name}, transfer {self.number} from rank "
            f"{ranks[self.src]} to rank {ranks[self.dst]} of group {ranks}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What arrived: tensors on the kind of device that they travelled on."""

    header: TransferHeader
    tensors: list[torch.Tensor]


@final
class Channel:
    """All messages between this rank and one peer of a group."""

    def __init__(self, state: GroupState, peer: int) -> None:
        self._state, self._peer = state, peer
        # Only gloo is known to take a message that is shorter than the memory offered for it.
        is_gloo = state.backend_of.get("cpu") == "gloo"
        self._outgoing = Framing() if is_gloo else None
        self._incoming = Framing() if is_gloo else None
        self._sending = threading.Lock()
        self._changed = threading.Condition()
        self._is_reading = False
        self._posted: tuple[Pending | None] | None = None  # the receive of a message to come
        self._arrived: dict[int, deque[Message]] = defaultdict(deque)
        self._unwanted: set[int] = set()
        # A queue that a finaliser may put into.
        self._outbox: SimpleQueue[Callable[[], None] | None] | None = None
        self._workers: dict[str, Worker] = {}

    @staticmethod
    def of(state: GroupState, peer: int) -> "Channel":
        """Return the one channel of a group to `peer` (inside the group)."""
        channel: Channel | None = state.channels.get(peer)
        if channel is None:
            channel = state.channels.setdefault(peer, Channel(state, peer))
        return channel

    def send(
        self, tensors: Sequence[torch.Tensor], transfer: Transfer, flags: int = 0
    ) -> tuple[list[Pending], list[torch.Tensor]]:
        """Start to send dense tensors; keep the buffers until the works are done.

        Raises:
            CommError: the peer is already known to be gone.
        """
        state = self._state
        kinds = [state.transport_type(t.device) for t in tensors]
        header = TransferHeader.describe(tensors, transfer.number, kinds, flags)
        try:
            # A gradient may be sent by another thread, and belongs behind its own header.
            with self._sending:
                buffers = self._messages(header, tensors)
                works = [state.transport.send(buffer, self._peer) for buffer in buffers]
        except RuntimeError as error:
            raise transfer.explain(error) from error
        return [work for work in works if work is not None], buffers

    def take(self, transfer: Transfer, *, gradient: bool = False) -> Message:
        """Return the next ordinary transfer, or the gradient of `transfer`.

        Raises:
            CommError: nothing came in time, or the peer is gone.
        """
        try:
            return self._take(transfer.number if gradient else _TRANSFERS, transfer)
        except CommError:
            raise
        except RuntimeError as error:
            raise transfer.explain(error) from error

    def expect(self) -> None:
        """Let the next message, which must be on its way or to come, arrive before it is taken."""
        with self._changed:
            if self._incoming is None or self._posted is not None or self._is_reading:
                return
            with suppress(RuntimeError):  # whoever takes the message gets the error
                work = self._state.transport.recv(self._incoming.offer(), self._peer)
                self._posted = (work,)

    def give_gradient(self, grads: Sequence[torch.Tensor], transfer: Transfer) -> None:
        """Send the gradient of what was received, without waiting for the peer to want it.

        No tensors stand for a gradient of zeros.
        """
        works, buffers = self.send(grads, transfer, IS_GRADIENT)

        def finish() -> None:
            for work in works:
                work.wait(_FOREVER)
            buffers.clear()

        if self._state.control_type == "cpu":
            self.later(finish)
        else:
            finish()  # only orders the stream behind it

    def launch(
        self, transfer: Transfer, run: Callable[[], T], *, inputs: Sequence[torch.Tensor]
    ) -> Handle[T]:
        """Run one side of a transfer after those of its direction that were started before.

        Directions have a thread each, and neither is that of the group's calls: a receive that
        waits for its sender holds up no call that the sender is in.
        """
        direction = self._direction(transfer)
        if direction not in self._workers:
            name = f"comm_collectives {direction} {self._peer}"
            self._workers[direction] = Worker(name, self)
        worker = self._workers[direction]
        return launch_on(worker, transfer.name, self._on_stream(run), inputs=inputs)

    def run(self, transfer: Transfer, run: Callable[[], T]) -> T:
        """As `launch`, and wait for it; on this thread, if nothing was started before."""
        worker = self._workers.get(self._direction(transfer))
        if worker is None or not worker.is_busy:
            return run()
        return self.launch(transfer, run, inputs=()).wait()

    def later(self, job: Callable[[], None]) -> None:
        """Run a job on the channel's own thread; errors of transfers are the peer's to notice."""
        if self._outbox is None:
            self.open_outbox()
        if self._outbox is not None:
            self._outbox.put(job)

    def open_outbox(self) -> None:
        """Start the channel's own thread, so that a finaliser need not."""
        with self._changed:
            if self._outbox is None:
                self._outbox = SimpleQueue()
                threading.Thread(target=_work_off, args=(self._outbox,), daemon=True).start()
                weakref.finalize(self, self._outbox.put, None).atexit = False

    def forget(self, number: int) -> None:
        """Discard the gradient of a transfer when it comes: nobody will take it."""
        self._unwanted.add(number)
        if self._arrived.pop(number, None):
            self._unwanted.discard(number)

    def _direction(self, transfer: Transfer) -> str:
        return "to" if transfer.src == self._state.rank else "from"

    def _on_stream(self, run: Callable[[], T]) -> Callable[[], T]:
        """Let work on an accelerator be queued where the caller's would be."""
        if self._state.control_type == "cpu":
            return run
        stream = torch.accelerator.current_stream()

        def run_there() -> T:
            with stream:
                return run()

        return run_there

    def _take(self, key: int, transfer: Transfer) -> Message:
        limit_s = transfer.limit_s or self._state.transport.limit_s
        deadline = time.monotonic() + limit_s
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._arrived.get(key) or not self._is_reading,
                    max(0.0, deadline - time.monotonic()),
                )
                messages = self._arrived.get(key)
                if messages:
                    message = messages.popleft()
                    if not messages:
                        self._arrived.pop(key, None)
                    return message
                if self._is_reading:
                    raise RuntimeError("timed out while another thread received from that rank")
                self._is_reading = True
            try:
                self._keep(self._receive(transfer))
            finally:
                with self._changed:
                    self._is_reading = False
                    self._changed.notify_all()

    def _keep(self, message: Message) -> None:
        number = message.header.number
        if not message.header.flags & IS_GRADIENT:
            self._arrived[_TRANSFERS].append(message)  # gate: position - a key, not a place
        elif number in self._unwanted:
            self._unwanted.discard(number)
        else:
            self._arrived[number].append(message)

    def _messages(
        self, header: TransferHeader, tensors: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        if self._outgoing is not None:
            return self._outgoing.pack(header, tensors)
        buffers = [words.to(self._state.control_type) for words in header.to_messages()]
        for tensor, kind in zip(tensors, header.travels, strict=True):
            if tensor.numel():
                buffers.append(as_bytes(dense(tensor)).to(kind))
        return buffers

    def _receive(self, transfer: Transfer) -> Message:
        """Receive the next message, whatever it is."""
        if self._incoming is not None:
            found = self._incoming.unpack(lambda flat: self._receive_into(flat, transfer))
            if found is None:
                raise MismatchError(f"{transfer}: no header arrived; an earlier call was skipped")
            return Message(header=found[0], tensors=found[1])
        words = self._receive_words(FIRST_WORDS, transfer)
        rest = TransferHeader.words_to_come(words)
        if rest:
            words += self._receive_words(rest, transfer)
        header = TransferHeader.from_words(words)
        if header is None:
            raise MismatchError(f"{transfer}: no header arrived; an earlier call was skipped")
        tensors = []
        for dtype, shape, kind in zip(header.dtypes, header.shapes, header.travels, strict=True):
            flat = torch.empty(num_bytes(dtype, shape), dtype=torch.uint8, device=kind)
            if flat.numel():
                self._receive_into(flat, transfer)
            tensors.append(from_bytes(flat, dtype, shape))
        return Message(header=header, tensors=tensors)

    def _receive_words(self, count: int, transfer: Transfer) -> list[int]:
        buffer = torch.empty(count, dtype=torch.int64, device=self._state.control_type)
        self._receive_into(buffer, transfer)
        words: list[int] = buffer.tolist()
        return words

    def _receive_into(self, buffer: torch.Tensor, transfer: Transfer) -> None:
        posted, self._posted = self._posted, None
        # Only a first message is received ahead, and nothing else is received before it.
        work = posted[0] if posted else self._state.transport.recv(buffer, self._peer)
        if work is not None:
            wait_for(work, transfer.limit_s)


def _work_off(outbox: "SimpleQueue[Callable[[], None] | None]") -> None:
    while (job := outbox.get()) is not None:
        with suppress(RuntimeError):  # the peer, who waits for it, has an error of its own
            job()
        del job  # what it holds must not live until the next one comes
