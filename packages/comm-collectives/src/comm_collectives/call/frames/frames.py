"""The engine under every call on the host: each rank sends each other one a frame, and gets theirs.

A step of a call is `offer`, which sends this rank's frames and returns the heads of all others, and
then `receive` (the heads agree: payloads go where they belong), or `drop` (they do not). So a step
ends well on a rank only if all made it, and ranks in different calls all see the same heads.

Invariants: a rank that leaves a call by an error of its own says so (`fail`), and the others get
that word in the same call, however late they come. What still comes of calls up to `settled` is
dropped. Nothing waits longer than the call's limit.

    frames = Frames(streams, clock)
    theirs = frames.offer(signature, step=1, cargo=Cargo(payloads=payloads), waiter=call)
    frames.receive(targets, waiter=call)
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, final

from comm_collectives.base.streams import Streams
from comm_collectives.base.transport import Clock
from comm_collectives.call.frames.link import (
    JOINED_BYTES,
    STAGED_BYTES,
    STAYED,
    Frame,
    Kind,
    Link,
    Notice,
    head_of,
    notices_of,
    views_of,
)

_LOOK_S = 0.5  # how often a waiting rank looks around, and before it says that it waits
_ASK_S = 0.1  # how often it looks then, and for how long it
_PRESSES_S = 2.0  # has waited


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Cargo:
    """What goes to each rank, by rank."""

    parts: Sequence[bytes] | None = None  # what it alone is told
    payloads: Sequence[memoryview] | None = None  # unchanged until `receive` returns
    apart: Sequence[int] | None = None  # bytes that travel elsewhere, announced only


class Waiter(Protocol):
    """The call on whose behalf the engine waits."""

    @property
    def limit_s(self) -> float:
        """How long to wait for the others."""

    number: int

    def not_all_here(self, missing: Collection[int], gone: Collection[int]) -> Exception:
        """Return the error for ranks that did not come, of which some are gone for good."""

    def told(self, notice: Notice) -> Exception:
        """Return the error for a call that a peer left with one."""

    def asked(self, peer: int, question: bytes) -> None:
        """Raise if a peer, which is missing, waits for this rank elsewhere."""

    def stuck(self, told: Sequence[bytes]) -> None:
        """Hear that the wait is long, and for what those that are missing say that they wait."""

    def go_on(self) -> None:
        """Hear that a wait is over that was long."""


@final
class Frames:
    """The frames of one group on this rank; one thread at a time."""

    def __init__(self, streams: Streams, clock: Clock, *, staged_bytes: int = STAGED_BYTES) -> None:
        """`staged_bytes` is how much is read ahead from each peer."""
        self.streams, self._clock = streams, clock
        others = [(streams.rank + i) % streams.size for i in range(1, streams.size)]
        self._links = {peer: Link(streams, peer, staged_bytes) for peer in others}
        self._notices: dict[int, Notice] = {}
        self._questions: dict[int, bytes] = {}
        self._waits: dict[int, bytes] = {}  # what peers say of their own waits
        self._open: set[int] = set()  # peers whose payload of this step was not received yet
        self.settled = 0
        self.missed: set[int] = set()  # calls that ended well here, which a peer left by an error
        self.late: Sequence[int] = ()  # the peers for which a call waits, or waited last
        self.waits_since_s = 0.0  # on the group's clock

    def offer(
        self, signature: bytes, *, step: int, cargo: Cargo, waiter: Waiter
    ) -> dict[int, Frame]:
        """Send each rank a frame; return the head and part of each other rank's. Collective.

        `signature` has SIGNATURE_BYTES; `step` is the number of this exchange in the call.
        """
        parts, payloads, apart = cargo.parts, cargo.payloads, cargo.apart
        whole: dict[int, memoryview] = {}
        views: Sequence[memoryview] = ()
        last, send = None, self.streams.send_some
        for peer, link in self._links.items():
            payload = None if payloads is None else payloads[peer]
            # Neighbours often get one and the same.
            if not views or payload is not last or parts is not None or apart is not None:
                part = b"" if parts is None else parts[peer]
                size = None if payload is None else len(payload)
                head = head_of(waiter.number, step, len(part), size, apart[peer] if apart else 0)
                if payload is None or not size:
                    views = (memoryview(b"".join((head, signature, part))),)
                elif size <= JOINED_BYTES:
                    views = (memoryview(b"".join((head, signature, part, payload, STAYED))),)
                else:
                    views = memoryview(b"".join((head, signature, part))), payload, STAYED
                last = payload
            if link.queue or len(views) > 1:
                self._send_each(whole)  # first, in the order of the ranks
                link.put(views)
            elif self.streams.send_each is not None:
                whole[peer] = views[0]
            elif (sent := send(peer, views[0])) < len(views[0]):
                link.keep(views, sent)
                link.flush()
        self._send_each(whole)
        return self._gather(Kind.STEP, waiter)

    def receive(self, targets: Sequence[memoryview] | None, waiter: Waiter) -> None:
        """Receive the payloads into memory of their sizes, by rank, and send what is left."""
        if targets is not None and self._open:
            links = self._links
            self._open = {p for p in self._open if not links[p].receive_staged(targets[p])}
        empty = {} if targets is None else {peer: targets[peer] for peer in self._open}

        def missing() -> list[int]:
            for peer in list(empty):
                link = self._links[peer]
                left = empty[peer] = link.receive(empty[peer])
                if not len(left) and link.has_ended():
                    if link.has_left and self._next(peer) is None and peer not in self._notices:
                        continue  # word of that stands behind the frame
                    del empty[peer]
                    self._open.discard(peer)
            return list(empty)

        self._until(missing, waiter)
        ready = self.streams.ready()
        for peer, link in self._links.items():  # word of a peer that left stands behind its frame
            if peer not in self._open and (link.is_ahead() or peer in ready):
                self._next(peer)
        for peer in [peer for peer in self._notices if peer not in self._open]:
            self._heed(peer, waiter)

    def drop(self) -> None:
        """Skip the payloads of this step."""
        for peer in self._open:
            self._links[peer].drop()
        self._open.clear()
        self.late = ()

    def tell(self, text: bytes, waiter: Waiter) -> dict[int, bytes]:
        """Exchange texts after the heads were found to differ. Collective."""
        views = views_of(Kind.TEXT, waiter.number, 0, part=text)
        for link in self._links.values():
            link.put(views)
        told = self._gather(Kind.TEXT, waiter)
        self.receive(None, waiter)
        return {peer: frame.part for peer, frame in told.items()}

    def fail(self, number: int, kind: str, text: str, circle: str = "") -> None:
        """Leave a call by an error, and let the others know. Not collective."""
        self.drop()
        self.settle(number)
        views = views_of(Kind.NOTICE, number, 0, part=f"{kind}\n{circle}\n{text}".encode())
        for link in self._links.values():
            link.abandon()
            link.put(views)

    def waiting(self) -> tuple[dict[int, bytes], dict[int, int]]:
        """Return what peers wait for elsewhere, and in which calls they are. Never waits."""
        calls = {}
        for peer, link in self._links.items():
            _ = link.queue and link.flush()  # what was said while the peer was not connected
            # What comes next of the others is payload.
            frame = None if peer in self._open else self._next(peer)
            if frame is not None and frame.kind == Kind.STEP:
                calls[peer] = frame.number
        return {peer: question for peer, question in self._questions.items() if question}, calls

    def say(self, kind: Kind, peers: Sequence[int], text: bytes) -> None:
        """Tell peers for what this rank waits: a question to them, or what they are to know.

        Waits a moment for those that may not be connected yet; others hear of it once they read.
        """
        links = [self._links[peer] for peer in peers]
        reading = [(p, link) for p, link in zip(peers, links, strict=True) if link.flush()]
        for link in links:
            link.send(kind, 0, 0, part=text, replaces=True)
        deadline_s = self._clock.now_s() + _ASK_S
        while (late := [p for p, link in reading if not link.flush()]) and (
            self._clock.now_s() < deadline_s
        ):
            self.streams.wait((), late, _ASK_S)

    def settle(self, number: int) -> None:
        """Drop what still comes of calls up to this one, which all ranks have left."""
        self.settled = max(self.settled, number)

    def ahead(self) -> dict[int, Frame]:
        """Return the steps that have come from peers and were not received. Never waits."""
        found = {}
        for peer in self._links:
            frame = self._next(peer)
            if frame is not None and frame.kind == Kind.STEP:
                found[peer] = frame
        return found

    def last_seen(self, peer: int) -> Frame | None:
        """Return the last step that came from a peer."""
        return self._links[peer].last

    def behind(self, number: int) -> list[int]:
        """Return the ranks that have not come to this call yet, as far as is known."""
        seen = {peer: link.last for peer, link in self._links.items()}
        return sorted(peer for peer, last in seen.items() if last is None or last.number < number)

    def _send_each(self, messages: dict[int, memoryview]) -> None:
        """Send a frame to each of these peers, for which none is queued; leave `messages` empty."""
        if not messages or self.streams.send_each is None:
            return
        part: dict[int, int] = {}
        try:
            self.streams.send_each(messages, part)
        finally:
            for peer, sent in part.items():
                self._links[peer].keep((messages[peer],), sent)
        messages.clear()

    def _gather(self, kind: Kind, waiter: Waiter) -> dict[int, Frame]:
        found: dict[int, Frame] = {}
        waits = dict.fromkeys(self._links)

        def missing() -> list[int]:
            ready, links, settled = self.streams.ready(), self._links, self.settled
            for peer in list(waits):
                link = links[peer]
                frame = link.look() if peer in ready or link.is_ahead() else None
                if frame is not None and (frame.kind != kind or frame.number <= settled):
                    frame = self._next(peer)
                # First, since a peer that left this call may be in its next one already.
                if self._notices:
                    self._heed(peer, waiter, in_text=kind == Kind.TEXT)
                if frame is not None and frame.kind == kind:
                    found[peer] = frame
                    del waits[peer]
                    if link.take():
                        self._open.add(peer)
            return list(waits)

        self._until(missing, waiter, sends_all=False)
        return found

    def _next(self, peer: int) -> Frame | None:
        """Return the next frame that is of use, and keep a notice."""
        link = self._links[peer]
        while (frame := link.look()) is not None:
            if frame.kind == Kind.QUESTION:
                self._questions[peer] = frame.part
            elif frame.kind == Kind.WAITS:
                self._waits[peer] = frame.part
            elif frame.number > self.settled:
                if frame.kind != Kind.NOTICE:
                    return frame
                held = self._notices.get(peer)
                if held is not None and held.number > self.settled:
                    return None  # this one is about a later call
                self._notices[peer] = notices_of(frame, peer)
            link.take()
            link.drop()
        return None

    def _heed(self, peer: int, waiter: Waiter, *, in_text: bool = False) -> None:
        """Raise if a peer has left this call."""
        notice = self._notices.get(peer)
        if notice is not None and (in_text or notice.number <= waiter.number):
            del self._notices[peer]
            if in_text or notice.number == waiter.number:
                raise waiter.told(notice)
            if notice.number > self.settled:
                self.missed.add(notice.number)

    def _until(
        self, missing: Callable[[], list[int]], waiter: Waiter, *, sends_all: bool = True
    ) -> None:
        """Move bytes until nothing is missing (and, with `sends_all`, all is sent)."""
        deadline_s, is_stuck = 0.0, False
        try:
            while True:
                self.late = waits = missing()
                sends = [p for p, link in self._links.items() if link.queue and not link.flush()]
                if not waits and not (sends and sends_all):
                    return
                if self._lose(missing, waits, waiter):
                    continue
                now_s, look_s = self._clock.now_s(), _LOOK_S
                if not deadline_s:
                    deadline_s, self.waits_since_s = now_s + waiter.limit_s, now_s
                if now_s >= deadline_s:
                    raise waiter.not_all_here(waits or sends, ())
                if waits and now_s >= self.waits_since_s + _LOOK_S:
                    is_stuck = True
                    waiter.stuck([self._waits[peer] for peer in waits if peer in self._waits])
                    if now_s < self.waits_since_s + _PRESSES_S:
                        look_s = _ASK_S
                self._answer(waits, waiter)
                self.streams.wait(waits, sends, min(deadline_s - now_s, look_s))
        finally:
            if is_stuck:
                waiter.go_on()

    def _answer(self, waits: Sequence[int], waiter: Waiter) -> None:
        """Show the questions of those that are missing; once, if one ends the call."""
        for peer in self._questions.keys() & waits:
            question = self._questions.pop(peer)
            if question:
                waiter.asked(peer, question)
                self._questions[peer] = question

    def _lose(self, missing: Callable[[], list[int]], waits: Sequence[int], waiter: Waiter) -> bool:
        """Raise if one that is waited for is gone; whether one was, which had sent it before."""
        gone = self.streams.gone()
        if not gone or not any(peer in gone for peer in waits):
            return False
        lost = [peer for peer in missing() if peer in gone]
        if lost:
            raise waiter.not_all_here(lost, lost)
        return True
