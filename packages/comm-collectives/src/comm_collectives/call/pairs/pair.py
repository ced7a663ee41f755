"""Both directions between this rank and one other: messages cut out of a stream, and queued.

A message is a list of tensors under a key; those of one key are taken in the order in which they
were asked for. Whoever reads the stream keeps what is meant for others. Nothing here waits.

Invariant: a message that was begun is sent, or received, to its end, whatever becomes of who asked
for it; the memory of what is sent is kept until then.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from threading import Condition
from typing import final

import torch

from comm_collectives.base import as_bytes, dense, from_bytes, num_bytes
from comm_collectives.base.streams import Streams
from comm_collectives.base.transport import Pending, TransferHeader, Transport
from comm_collectives.call.frames import Frame, Link, memory_of
from comm_collectives.call.pairs.held import HeldSends, Launch
from comm_collectives.errors import MismatchError

_KEPT_WORDS = 64


class Word(IntEnum):
    """What a frame of a pair is: a message, or word about one of the other side's."""

    MESSAGE = 4
    REFUSED = 5  # this message of yours is of no use here
    AWAITED = 6  # this rank waits for this message of yours, and does nothing else
    STUCK = 7  # this message will never come, and why
    GRANTED = 8  # the devices' data of this message of yours may be queued now
    WAITS = 9  # for what this rank waits, for which you wait


_LATEST = (Word.AWAITED, Word.WAITS)  # of which only the last counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What arrived: tensors on the kind of device on which they travelled, and the sender's flags.

    `place` is the number of the message among those of its key. On a device `works` are under way:
    whoever takes the message lets its stream wait for them.
    """

    tensors: list[torch.Tensor]
    flags: int
    place: int
    source: int
    works: list[Pending]

    def settle(self) -> None:
        """Let the current stream wait for the tensors, which another one may have allocated."""
        while self.works:
            self.works.pop(0).wait()
        for tensor in self.tensors:
            if tensor.device.type != "cpu":
                tensor.record_stream(torch.accelerator.current_stream(tensor.device))


@final
@dataclass(slots=True, eq=False)
class Ticket:
    """A receive that was asked for, filled by whoever reads its message."""

    key: int
    message: Message | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """Word of the peer about message `place` of a key."""

    word: int
    key: int
    place: int
    text: str


@final
class Pair:
    """See the module. `changed` is the lane's, under which messages are handed over.

    `launch` starts what a device moves.
    """

    def __init__(
        self,
        streams: Streams,
        peer: int,
        transport: Transport,
        changed: Condition,
        launch: Launch,
    ) -> None:
        self.peer, self.is_reading, self.is_expecting = peer, False, False
        # Questions to the peer so far, the one that is open, and those of the peer that are over.
        self.asked = self.open = self.over = 0
        self.open_place = 0  # of the message that the open one is about
        self.held = HeldSends(transport, peer, holds=streams.rank > peer, launch=launch)
        self._grants = streams.rank < peer
        self._streams, self._transport, self._changed = streams, transport, changed
        self._launch = launch
        self._link = Link(streams, peer)
        self.sending = transport.clock.lock()
        # Messages by key, those of a backward as long as its graph lives.
        self.sent: Counter[int] = Counter()
        self.came: Counter[int] = Counter()
        self._queued = 0  # frames, ever
        self._lost_from: int | None = None  # the first frame that went to a peer that is gone
        self._kept: deque[Sequence[torch.Tensor]] = deque()
        self._header: tuple[Frame, TransferHeader] | None = None  # of the message that comes
        self._tensors: list[torch.Tensor] = []
        self._works: list[Pending] = []  # its receives on a device
        self._rooms: deque[memoryview] = deque()
        self._arrived: dict[int, deque[Message]] = defaultdict(deque)
        self._tickets: dict[int, deque[Ticket]] = defaultdict(deque)
        self._unwanted: set[int] = set()
        self.void: set[tuple[int, int]] = set()  # key and place of messages that ended in an error
        self.said: deque[Said] = deque(maxlen=_KEPT_WORDS)
        self.awaited: Said | None = None  # the message for which the peer waits, if it said so
        self.chain = b""  # what it says of its own wait

    def send(
        self, tensors: Sequence[torch.Tensor], kinds: Sequence[str], key: int, flags: int
    ) -> tuple[int, int, list[Pending]]:
        """Queue dense tensors for these kinds of device, and send what there is room for.

        Returns:
            The number of the message among those of its key, that of its frame, and transfers on
            devices, which follow the frame, now or when the peer is ready for them.
        """
        header = TransferHeader.describe(tensors, kinds, flags)
        place_of = self._transport.place
        flat = [as_bytes(dense(x)).to(place_of(k)) for x, k in zip(tensors, kinds, strict=True)]
        host = [memory_of(x) for x in flat if x.device.type == "cpu" and x.numel()]
        with self.sending:
            self.sent[key] += 1
            place = self.sent[key]
            self._queue(Word.MESSAGE, key, place, part=header.pack(), payload=host, kept=flat)
            number = self._queued
            apart = [x for x in flat if x.device.type != "cpu" and x.numel()]
            works = self.held.send(apart, key=key, place=place, number=number)
        return place, number, works

    def say(self, word: Word, key: int, place: int, text: str) -> None:
        """Send the peer word about one of its messages."""
        with self.sending:
            self._queue(word, key, place, part=text.encode(), payload=None, kept=())

    def flush(self) -> bool:
        """Send what there is room for; whether all is sent."""
        with self.sending:
            return self._flush()

    def is_sent(self, number: int) -> bool:
        """Whether all of a message is on its way, or lost."""
        return number <= self._queued - self._link.queued and not self.held.has(number)

    def is_lost(self, number: int) -> bool:
        """Whether the peer was gone before a frame was sent."""
        return self._lost_from is not None and number >= self._lost_from

    def has_refused(self, key: int, place: int) -> bool:
        """Whether the peer has said that a message is of no use to it."""
        return (Word.REFUSED, key, place) in ((one.word, one.key, one.place) for one in self.said)

    def is_receiving(self, key: int, place: int) -> bool:
        """Whether a message has begun to come, so that somebody reads it."""
        header = self._header
        return header is not None and (header[0].number, header[0].step) == (key, place)

    def post(self, ticket: Ticket) -> None:
        """Ask for the next message of the ticket's key; call with `changed` held."""
        waiting = self._arrived.get(ticket.key)
        if waiting and ticket.message is None:
            ticket.message = waiting.popleft()
            if not waiting:
                del self._arrived[ticket.key]
        elif ticket.message is None:
            self._tickets[ticket.key].append(ticket)

    def withdraw(self, ticket: Ticket) -> None:
        """Leave the message to the next receive; call with `changed` held."""
        tickets = self._tickets.get(ticket.key)
        if tickets and ticket in tickets:
            tickets.remove(ticket)
        if not tickets:
            self._tickets.pop(ticket.key, None)

    def forget(self, key: int) -> None:
        """Discard the message of a key when it comes. A finaliser may call this."""
        self._unwanted.add(key)
        if self._arrived.pop(key, None):
            self._unwanted.discard(key)
            self.came.pop(key, None)

    def expect(self, key: int) -> None:
        """Have the next message of a key read ahead; call with `changed` held."""
        self.is_expecting = not self._arrived.get(key)

    def has_expected(self) -> bool:
        """Whether nothing is expected any more, neither a message nor word of one that is held."""
        return not (self.is_expecting or len(self.held))

    def place_of_next(self, key: int) -> int:
        """The number of the next message for whom no ticket is out; call with `changed` held."""
        open_tickets = [t for t in self._tickets.get(key, ()) if t.message is None]
        void = sum(of == key for of, _ in self.void)  # which come first, and go to nobody
        return self.came[key] - len(self._arrived.get(key, ())) + len(open_tickets) + void + 1

    def place_of(self, ticket: Ticket) -> int:
        """The number of the message that comes to a ticket; call with `changed` held."""
        if ticket.message is not None:
            return ticket.message.place
        before = [t for t in self._tickets.get(ticket.key, ()) if t.message is None]
        late = len(before) - before.index(ticket)
        return self.place_of_next(ticket.key) - late

    def read(self, enough: Callable[[], bool]) -> None:
        """Read what is there until that is enough; only by who set `is_reading`."""
        while not enough() and self._read_some():
            pass

    def _queue(
        self,
        word: Word,
        key: int,
        place: int,
        *,
        part: bytes,
        payload: Sequence[memoryview] | None,
        kept: Sequence[torch.Tensor],
    ) -> None:
        replaces = word in _LATEST
        if self._link.send(word, key, place, part=part, payload=payload, replaces=replaces):
            self._queued += 1
            self._kept.append(kept)
        self._flush()

    def _flush(self) -> bool:
        first = self._queued - self._link.queued + 1
        is_done = self._link.flush()
        while len(self._kept) > self._link.queued:
            self._kept.popleft()
        if self._lost_from is None and self.peer in self._streams.gone():
            self._lost_from = first
        return is_done

    def _read_some(self) -> bool:
        """Read one frame, or a part of one; whether it came to its end."""
        if self._header is None:
            frame = self._link.look()
            if frame is None:
                return False
            if frame.kind != Word.MESSAGE:
                self._link.take()
                self._hear(frame)
                return True
            self._begin(frame)
        while self._rooms:
            left = self._link.receive(self._rooms[0])
            if len(left):
                self._rooms[0] = left
                return False
            self._rooms.popleft()
        self._end()
        return True

    def _hear(self, frame: Frame) -> None:
        text = frame.part.decode(errors="replace")
        said = Said(word=frame.kind, key=frame.number, place=frame.step, text=text)
        if said.word == Word.GRANTED:
            self.held.grant(said.key, said.place)
        elif said.word == Word.AWAITED:
            self.awaited = said if text else None
        elif said.word == Word.WAITS:
            self.chain = frame.part
        else:
            self.said.append(said)

    def _begin(self, frame: Frame) -> None:
        """Take a message's frame once there is memory for it: who has none may try again."""
        header = TransferHeader.unpack(frame.part)
        if header is None:
            self._link.take()
            raise MismatchError(f"rank {self.peer} of the group sent what is no transfer")
        tensors: list[torch.Tensor] = []
        rooms: list[memoryview] = []
        apart: list[torch.Tensor] = []
        for dtype, shape, kind in zip(header.dtypes, header.shapes, header.travels, strict=True):
            device = self._transport.place(kind)
            flat = torch.empty(num_bytes(dtype, shape), dtype=torch.uint8, device=device)
            tensors.append(from_bytes(flat, dtype, shape))
            if flat.numel() and kind == "cpu":
                rooms.append(memory_of(flat))
            elif flat.numel():
                apart.append(flat)
        self._link.take()
        self._header, self._tensors = (frame, header), tensors
        self._rooms.extend(rooms)
        with self.sending:  # so that the peer hears of this rank's transfers in their order
            recv = self._transport.recv
            self._works = self._launch(
                "recv from", self.peer, lambda: [recv(flat, self.peer) for flat in apart]
            )
            if apart and self._grants:
                self._queue(Word.GRANTED, frame.number, frame.step, part=b"", payload=None, kept=())

    def _end(self) -> None:
        if self._header is None:
            return
        (frame, header), tensors = self._header, self._tensors
        key = frame.number
        works, self._works = self._works, []
        self._header, self._tensors = None, []
        message = Message(
            tensors=tensors, flags=header.flags, place=frame.step, source=self.peer, works=works
        )
        with self._changed:
            self.came[key] += 1
            tickets = self._tickets[key]
            while tickets and tickets[0].message is not None:  # filled by another pair
                tickets.popleft()
            if (key, message.place) in self.void:
                self.void.discard((key, message.place))
            elif key in self._unwanted:
                self._unwanted.discard(key)
                del self.came[key]
            elif tickets:
                tickets.popleft().message = message
            else:
                self._arrived[key].append(message)
            if not tickets:
                del self._tickets[key]  # a backward has a key of its own for each of its transfers
            if key == 0:
                self.is_expecting = False
            self._changed.notify_all()
