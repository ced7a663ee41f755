"""Frames cut out of the stream from one peer, and queued for the one to it.

    head: magic, kind, number of the call, step in it, bytes of part, bytes of payload with two
        flags (it travels elsewhere; an end follows it), signature
    part: what this rank alone is told, or a text
    payload: data, which is received straight where it belongs
    end: one byte; whether the sender has left the call since the frame was begun

Invariant: a frame that was begun is sent to its end, and one that was received in part is received
to its end or skipped, whatever becomes of the call; so both ends stay in step.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple, NoReturn, final

from comm_collectives.base.streams import Streams
from comm_collectives.errors import CommError

SIGNATURE_BYTES = 128
_MAGIC = 0x6D6F6563
_PREFIX = struct.Struct("<IIqqqq")
_HEAD_BYTES = _PREFIX.size + SIGNATURE_BYTES
STAGED_BYTES = 1 << 16
JOINED_BYTES = 1 << 14  # a payload so small is copied behind its head, and sent with it
_KNOWN = 256  # heads that are kept
STAYED = memoryview(b"\0")  # the end of a payload; it has to be this object
_APART, _ENDS = 1, 2  # flags of the size
NO_SIGNATURE = bytes(SIGNATURE_BYTES)


class Kind(IntEnum):
    """What a frame is: a step of a call, a text about one, word that this rank left one, that it
    waits elsewhere for the peer, or for what it waits itself."""

    STEP = 1
    TEXT = 2
    NOTICE = 3
    QUESTION = 4
    WAITS = 5


@final
class Frame(NamedTuple):
    """A frame but for its payload, of which `size` bytes follow or, if apart, travel elsewhere."""

    kind: int
    number: int
    step: int
    size: int
    signature: bytes
    part: bytes


@final
@dataclass(frozen=True, slots=True)
class Notice:
    """A peer left call `number` with an error of class `kind`, in a `circle` of waits if any."""

    peer: int
    number: int
    kind: str
    text: str
    circle: str = ""


@final
class Link:
    """One peer's side of the frames of a group."""

    __slots__ = (
        "_at",
        "_coming",
        "_end",
        "_has_begun",
        "_peer",
        "_skipped",
        "_staged",
        "_staged_bytes",
        "_streams",
        "_view",
        "frame",
        "has_left",
        "last",
        "queue",
    )

    def __init__(self, streams: Streams, peer: int, staged_bytes: int = STAGED_BYTES) -> None:
        self._streams, self._peer = streams, peer
        self.frame: Frame | None = None  # the one at which the stream stands
        self.last: Frame | None = None  # the last first step that came
        self._coming = 0  # bytes of its payload, and of its end
        self.has_left = False  # whether the peer left the call of the frame that was taken
        self._skipped = 0  # bytes that nobody wants
        self._staged, self._staged_bytes = bytearray(), staged_bytes  # once it is read from
        self._view = memoryview(b"")
        self._at = self._end = 0
        self.queue: list[list[memoryview]] = []  # of frames, as what is left of each
        self._has_begun = False  # the first frame of the queue

    def send(
        self,
        kind: int,
        number: int,
        step: int,
        *,
        part: bytes = b"",
        payload: Sequence[memoryview] | None = None,
        replaces: bool = False,
    ) -> bool:
        """Queue a frame; whether there is one more now.

        `replaces`: in the place of the last one, if that is of its kind and has not begun. So word
        to a peer that never reads does not pile up.
        """
        views = [*views_of(kind, number, step, part=part, payload=payload)]
        if replaces and len(self.queue) > self._has_begun and _kind_of(self.queue[-1]) == kind:
            self.queue[-1] = views
            return False
        self.queue.append(views)
        return True

    def put(self, views: Sequence[memoryview]) -> None:
        """Send what there is room for of a frame, behind what is queued, and queue the rest."""
        if not self.queue and len(views) == 1:
            sent = self._streams.send_some(self._peer, views[0])
            if sent == len(views[0]):
                return
            self.keep(views, sent)
        else:
            self.queue.append([*views])
        self.flush()

    def keep(self, views: Sequence[memoryview], sent: int) -> None:
        """Queue what is left of a frame of which so many bytes of its first piece were sent."""
        self._has_begun = sent > 0
        self.queue.append([views[0][sent:], *views[1:]])

    def is_ahead(self) -> bool:
        """Whether anything was read ahead."""
        return self._end > self._at or self.frame is not None

    @property
    def queued(self) -> int:
        """How many frames are not sent to their end."""
        return len(self.queue)

    def flush(self) -> bool:
        """Send what there is room for; whether all is sent."""
        while self.queue:
            views = self.queue[0]
            while views:
                sent = self._streams.send_some(self._peer, views[0])
                if not sent:
                    return False
                self._has_begun = True
                if sent == len(views[0]):
                    del views[0]
                else:
                    views[0] = views[0][sent:]
            self.queue.pop(0)
            self._has_begun = False
        return True

    def look(self) -> Frame | None:
        """Return the frame at which the stream stands, once its head and part are here."""
        if self.frame is not None:
            return self.frame
        if self._at == self._end and not self._fill():
            return None
        while True:
            if self._skipped:
                staged = min(self._end - self._at, self._skipped)
                self._at += staged
                self._skipped -= staged
            at, there = self._at, self._end - self._at
            if there >= _HEAD_BYTES and not self._skipped:
                head = bytes(self._view[at : at + _HEAD_BYTES])
                frame, length, coming = _read_head(head) or self._refuse()
                if there >= _HEAD_BYTES + length:
                    break
                self._make_room(_HEAD_BYTES + length)
            if not self._fill():
                return None
        at += _HEAD_BYTES
        if length:
            part = bytes(self._view[at : at + length])
            frame = Frame(frame.kind, frame.number, frame.step, frame.size, frame.signature, part)
        self._at, self._coming, self.frame = at + length, coming, frame
        if frame.step == 1 and frame.kind == Kind.STEP:
            self.last = frame
        return frame

    def receive_staged(self, into: memoryview) -> bool:
        """Receive payload and end of the frame that was taken, if all of it has been read ahead.

        False, and nothing has happened, if not, or if the peer left its call.
        """
        at = self._at
        end = at + len(into)
        if self._coming != len(into) + 1 or self._end <= end or self._staged[end] != STAYED[0]:
            return False
        into[:] = self._view[at:end]
        self._at, self._coming = end + 1, 0
        return True

    def receive(self, into: memoryview) -> memoryview:
        """Receive payload of the frame that was taken; return what of `into` is still empty."""
        staged = min(self._end - self._at, len(into))
        if staged:
            into[:staged] = self._view[self._at : self._at + staged]
            self._at += staged
            self._coming -= staged
            into = into[staged:]
        while into:
            got = self._streams.recv_some(self._peer, into)
            if not got:
                break
            self._coming -= got
            into = into[got:]
        return into

    def has_ended(self) -> bool:
        """Whether the end behind a payload that was received is here; see `has_left` then."""
        if self._coming:
            if self._at == self._end and not self._fill():
                return False
            self.has_left = self._staged[self._at] != STAYED[0]
            self._at += 1
            self._coming = 0
        return True

    def take(self) -> bool:
        """Take the frame; whether payload follows, to be received or dropped."""
        self.frame = None
        if self._coming:
            self.has_left = False
        return self._coming > 0

    def drop(self) -> None:
        """Skip what was not received of the payload of the frame that was taken."""
        self._skipped += self._coming
        self._coming = 0

    def abandon(self) -> None:
        """Forget the steps that are queued, but a copy of what is left of the one that was begun.

        Whoever gave its memory leaves with an error now, and may free it. The end of the copy says
        that; word about earlier calls is kept.
        """
        if not self.queue:
            return
        begun = [self.queue.pop(0)] if self._has_begun else []
        for views in begun:
            has_end = views[-1] is STAYED or _has_end(views[-1].obj)
            copied = bytearray().join(views)
            if has_end:
                copied[-1] = 1
            views[:] = [memoryview(copied)]
        words = (Kind.NOTICE, Kind.QUESTION, Kind.WAITS)
        kept = [views for views in self.queue if _kind_of(views) in words]
        self.queue = [*begun, *kept]

    def _refuse(self) -> NoReturn:
        raise CommError(
            f"rank {self._peer} of the group sent what this package did not; use one version "
            "of it on every rank"
        )

    def _fill(self) -> bool:
        """Read more of the stream; whether anything came."""
        # Not from the beginning each time: a look for a notice would be handed old payload again.
        end, room = self._end, len(self._staged)
        if self._at == end > room // 2:
            self._at = self._end = end = 0
        if end == room:
            if room:
                self._make_room(room)
            else:
                self._renew(self._staged_bytes)
            end = self._end
        got = self._streams.recv_some(self._peer, self._view[end:] if end else self._view)
        self._end += got
        return got > 0

    def _make_room(self, length: int) -> None:
        """Move what is staged to the beginning, of a larger buffer if a frame needs that."""
        kept = bytes(self._view[self._at : self._end])
        if length > len(self._staged):
            self._renew(2 * length)
        self._view[: len(kept)] = kept
        self._at, self._end = 0, len(kept)

    def _renew(self, size: int) -> None:
        self._staged = bytearray(size)
        self._view = memoryview(self._staged)


@lru_cache(_KNOWN)
def _read_head(head: bytes) -> tuple[Frame, int, int] | None:
    """Return a frame without its part, and the bytes of that and of what follows.

    None if this package did not write it. Peers often send one and the same.
    """
    magic, kind, number, step, length, coded = _PREFIX.unpack_from(head)
    coming = 0 if coded & _APART else (coded >> 2) + bool(coded & _ENDS)
    frame = Frame(kind, number, step, coded >> 2, head[_PREFIX.size :], b"")
    return (frame, length, coming) if magic == _MAGIC else None


def views_of(
    kind: int,
    number: int,
    step: int,
    *,
    part: bytes = b"",
    payload: Sequence[memoryview] | None = None,
) -> Sequence[memoryview]:
    """Return a frame without a signature as bytes to send."""
    size = 0 if payload is None else sum(map(len, payload))
    coded = size << 2 | (_APART if payload is None else 0)
    head = _PREFIX.pack(_MAGIC, kind, number, step, len(part), coded) + NO_SIGNATURE + part
    if payload is None or not size:
        return (memoryview(head),)
    if size <= JOINED_BYTES:
        return (memoryview(b"".join((head, *payload))),)
    return (memoryview(head), *payload)


def head_of(number: int, step: int, part_bytes: int, size: int | None, apart: int) -> bytes:
    """Return what stands ahead of a step's signature; its payload has an end, unless it is empty.

    `apart` announces a payload that travels elsewhere, if `size` is None.
    """
    coded = apart << 2 | _APART if size is None else size << 2 | (_ENDS if size else 0)
    return _PREFIX.pack(_MAGIC, Kind.STEP, number, step, part_bytes, coded)


def _kind_of(views: Sequence[memoryview]) -> int:
    """The kind of a frame of which nothing is sent."""
    kind: int = _PREFIX.unpack_from(views[0])[1]
    return kind


def _has_end(frame: object) -> bool:
    """Whether this is a frame whose payload stands behind its head, with an end."""
    if not isinstance(frame, bytes) or len(frame) < _HEAD_BYTES:
        return False
    return bool(_PREFIX.unpack_from(frame)[-1] & _ENDS)


def notices_of(frame: Frame, peer: int) -> Notice:
    """Read a frame of the kind NOTICE."""
    kind, circle, text = frame.part.decode(errors="replace").split("\n", 2)
    return Notice(peer, frame.number, kind, text, circle)
