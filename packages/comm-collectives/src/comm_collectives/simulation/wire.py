"""The operations of one simulated group, paired up as gloo does it: by their number and kind.

Gloo numbers the collectives of a group on every rank and pairs messages by that number and the kind
of operation, nothing else. So here: different kinds wait for each other until the limit, a message
longer than the buffer aborts the receiver, a shorter one leaves the rest of the buffer as it was
(here: filled with a pattern, so that nobody takes it for data).

    wire = Wire(size=4)
    round_ = wire.round(1, "exchange")
    round_.begin(0, data, offsets)
    round_.piece(0, 3)              # what rank 0 sent to rank 3
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import final

import torch

from comm_collectives.simulation.scheduler import Signal, Unwound

CLOSED = "Connection closed by peer"
_GARBAGE = b"\xab"
_COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
}


class Aborted(Unwound):
    """Ends a rank as gloo's abort does, when more arrives than its buffer holds."""


@final
class Round:
    """One operation: who has begun it, and with which message. Ranks are inside the group.

    A message passes at the moment at which both ends have begun, if they are connected then.
    """

    def __init__(self, size: int) -> None:
        self._sources: list[bytes | None] = [None] * size
        self._offsets: list[Sequence[int] | None] = [None] * size
        self._common: tuple[object, bytes] | None = None
        # By receiver and sender, messages that do not pass; True: cut short.
        self._flaws: list[dict[int, bool]] = [{} for _ in range(size)]
        self._is_flawed = False
        self.here = [False] * size
        self.num_here = 0
        self.signal = Signal()

    @property
    def is_complete(self) -> bool:
        """Whether everybody is here and every message has passed."""
        return self.num_here == len(self.here) and not self._is_flawed

    def begin(self, rank: int, data: bytes | None, offsets: Sequence[int] | None) -> None:
        """Let a rank begin, with one message for all, or one for each rank, cut at `offsets`."""
        self._offsets[rank] = offsets
        self._sources[rank] = data
        self.here[rank] = True
        self.num_here += 1

    def spoil(self, src: int, dst: int, *, cut: bool = False) -> None:
        """Keep a message from passing, or let only its beginning pass."""
        self._flaws[dst].setdefault(src, cut)
        self._is_flawed = True

    def sever(self, one: int, other: int) -> None:
        """Note that two ranks have no connection any more; what has passed has passed."""
        if not (self.here[one] and self.here[other]):
            self.spoil(one, other)
            self.spoil(other, one)

    def sever_all(self, rank: int) -> None:
        """Note that a rank has no connections any more."""
        if self.num_here < len(self.here):
            for other in range(len(self.here)):
                if other != rank:
                    self.sever(rank, other)

    def flaws(self, rank: int) -> dict[int, bool]:
        """Return whose messages do not pass to `rank`; True for those that come cut short."""
        return self._flaws[rank]

    def piece(self, src: int, dst: int) -> bytes:
        """Return the message from `src` to `dst`."""
        data, offsets = self._sources[src] or b"", self._offsets[src]
        return data if offsets is None else data[offsets[dst] : offsets[dst + 1]]

    def pieces(self, dst: int) -> list[bytes]:
        """Return the messages of all ranks to `dst`."""
        next_ = dst + 1
        return [
            (data or b"") if offsets is None else (data or b"")[offsets[dst] : offsets[next_]]
            for data, offsets in zip(self._sources, self._offsets, strict=True)
        ]

    def reduced(self, rule: tuple[torch.dtype, str], num_bytes: int) -> bytes:
        """Reduce the messages of all ranks in their order; alike for ranks with the same rule.

        Raises:
            Aborted: a message is longer than `num_bytes`.
        """
        key = (rule, num_bytes)
        if self._common is None or self._common[0] != key:
            dtype, op = rule
            pieces = [source or b"" for source in self._sources]
            data = b"".join(fitted(pieces, [num_bytes] * len(pieces)))
            rows = torch.frombuffer(bytearray(data), dtype=dtype).view(len(self._sources), -1)
            total = rows[0]
            for row in rows[1:]:
                total = _COMBINE[op](total, row)
            flat = total.contiguous().view(torch.uint8)
            self._common = key, ctypes.string_at(flat.data_ptr(), flat.numel())
        return self._common[1]


@final
class MessageQueue:
    """Messages from one rank to another, in their order."""

    def __init__(self) -> None:
        self._sent: list[bytes | None] = []
        self._read = 0
        self.signal = Signal()

    def send(self, data: bytes | None) -> None:
        """Add a message; None is one that is cut."""
        self._sent.append(data)

    def next_number(self) -> int:
        """Return the number of the message that the next receive gets."""
        self._read += 1
        return self._read - 1

    def has(self, number: int) -> bool:
        """Whether a message has come."""
        return number < len(self._sent)

    def message(self, number: int) -> bytes | None:
        """Return a message that has come."""
        return self._sent[number]


@final
class Wire:
    """The connections of one group, and what runs over them."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._closed: set[tuple[int, int]] = set()
        self._gone: dict[int, str] = {}
        self._rounds: dict[tuple[int, str], Round] = {}
        self._channels: dict[tuple[int, int], MessageQueue] = {}

    def round(self, number: int, kind: str) -> Round:
        """Return an operation by its number and kind."""
        key = (number, kind)
        found = self._rounds.get(key)
        if found is None:
            found = self._rounds[key] = Round(self._size)
            for rank in self._gone:
                found.sever_all(rank)
            for one, other in self._closed:
                found.sever(one, other)
        return found

    def channel(self, src: int, dst: int) -> MessageQueue:
        """Return the messages from one rank to another."""
        return self._channels.setdefault((src, dst), MessageQueue())

    def close(self, one: int, other: int) -> None:
        """Close one connection."""
        self._closed |= {(one, other), (other, one)}
        for round_ in self._rounds.values():
            round_.sever(one, other)

    def leave(self, rank: int, reason: str) -> None:
        """Close all connections of a rank; `reason` is what it will hear itself, if it lives."""
        if rank not in self._gone:
            self._gone[rank] = reason
            for round_ in self._rounds.values():
                round_.sever_all(rank)

    def problem(self, rank: int, other: int) -> str | None:
        """Return why a rank has no connection to another one; None if it has."""
        if rank in self._gone:
            return self._gone[rank]
        return CLOSED if other in self._gone or (rank, other) in self._closed else None

    @property
    def has_closed(self) -> bool:
        """Whether any two ranks have lost their connection."""
        return bool(self._closed or self._gone)

    def signals(self) -> Iterator[Signal]:
        """Yield everything that somebody may wait for."""
        for round_ in self._rounds.values():
            yield round_.signal
        for channel in self._channels.values():
            yield channel.signal


def offsets_of(sizes: Sequence[int]) -> list[int]:
    """Return where pieces of these sizes begin, and where the last one ends."""
    return list(accumulate(sizes, initial=0))


def scatter_bytes(messages: Sequence[bytes], sizes: Sequence[int], target: torch.Tensor) -> None:
    """Write messages into a flat buffer that expects these sizes.

    Raises:
        Aborted: a message is longer than its place.
    """
    data = b"".join(fitted(messages, sizes))
    ctypes.memmove(target.data_ptr(), data, len(data))


def fitted(messages: Sequence[bytes], sizes: Sequence[int]) -> Sequence[bytes]:
    """Return messages as they stand in buffers of these sizes.

    Raises:
        Aborted: a message is longer than its buffer.
    """
    if [len(message) for message in messages] == list(sizes):
        return messages
    for src, (message, size) in enumerate(zip(messages, sizes, strict=True)):
        if len(message) > size:
            raise Aborted(f"rank {src} sent {len(message)} bytes for a buffer of {size}")
    return [message.ljust(size, _GARBAGE) for message, size in zip(messages, sizes, strict=True)]
