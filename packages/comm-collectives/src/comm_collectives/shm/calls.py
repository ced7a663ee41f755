"""One collective of the backend: which frames its ranks exchange, and what its failure says.

Every rank sends each other one a frame in each step of a call, with what the call is ahead of the
data. So a difference is an error on every rank, before any data has been used, and the group goes
on. A rank that gives up in the middle tells the others, who fail in the same call.

    with calls.begin(head, limit_s) as call:
        call.exchange(sends, receives)              # contiguous tensors, by rank
"""

import struct
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import final

import torch

from comm_collectives.base.streams import Streams
from comm_collectives.base.transport import SYSTEM_CLOCK
from comm_collectives.call.frames import NO_SIGNATURE, Cargo, Frame, Frames, Notice, memory_of
from comm_collectives.errors import (
    CollectiveTimeoutError,
    CommError,
    MismatchError,
    PeerFailedError,
    RefusedError,
)
from comm_collectives.shm.arguments import Tensors
from comm_collectives.shm.heads import Head


@final
class Room:
    """Equally many elements of each rank, by rank, in memory that is kept."""

    def __init__(self, memory: torch.Tensor, count: int, size: int) -> None:
        self.count, self.dtype = count, memory.dtype
        self.tensors = [memory[rank * count : (rank + 1) * count] for rank in range(size)]
        self.memory = [memory_of(row) for row in self.tensors]


@final
class Calls:
    """The calls of one group on this rank; one at a time.

    Attributes:
        names: what the ranks are called in errors.
    """

    def __init__(self, streams: Streams, names: Sequence[int]) -> None:
        self.rank, self.size, self.names = streams.rank, streams.size, tuple(names)
        self.frames = Frames(streams, SYSTEM_CLOCK)
        self._scratch = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._rows = Room(self._scratch, 0, self.size)
        self._last = 0
        self._given_up: list[object] = []

    @contextmanager
    def begin(self, head: Head, limit_s: float, holds: object) -> "Iterator[Call]":
        """Make the next call. Collective; `holds` keeps alive the memory that it uses.

        Raises:
            CommError: it failed; the others are told, unless they know.
        """
        self._last += 1
        call = Call(self, head, self._last, limit_s)
        try:
            yield call
        except (MismatchError, RefusedError):
            raise
        except BaseException as error:
            # What has begun to be sent is sent to its end, whenever that is.
            self._given_up.append(holds)
            self.frames.fail(call.number, type(error).__name__, str(error))
            raise

    def rows(self, count: int, dtype: torch.dtype) -> "Room":
        """Return room for `count` elements of each rank, good until the next call of this."""
        if self._rows.count != count or self._rows.dtype != dtype:
            num_bytes = self.size * count * dtype.itemsize
            if self._scratch.numel() < num_bytes:
                self._scratch = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
            self._rows = Room(self._scratch[:num_bytes].view(dtype), count, self.size)
        return self._rows

    def missing(self) -> list[int]:
        """Return the ranks that have not come to the last call of this one, as far as is known."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        seen = {rank: self.frames.last_seen(rank) for rank in others}
        return [rank for rank, frame in seen.items() if not frame or frame.number < self._last]

    def named(self, ranks: Collection[int]) -> str:
        """Return ranks as words."""
        if not ranks:
            return "nobody is missing here, an earlier call is still under way"
        return ", ".join(f"rank {self.names[rank]}" for rank in sorted(ranks))


@final
class Call:
    """One collective under way; for the engine of frames the one that waits."""

    def __init__(self, calls: Calls, head: Head, number: int, limit_s: float) -> None:
        self.calls, self.number, self.limit_s = calls, number, limit_s
        self.rank, self.size = calls.rank, calls.size
        self._head = head
        self._signature = head.pack().ljust(len(NO_SIGNATURE), b"\0")
        self._step = 0

    def exchange(self, sends: Tensors | None, receives: "Tensors | Room | None") -> None:
        """Send contiguous tensors by rank, and receive what the others send this one.

        The sizes are those that the other side expects, as the heads agree.

        Raises:
            MismatchError: the ranks make different calls; on every rank.
            CommError: a rank did not come, or gave up.
        """
        self._offer(sends, b"")
        self._receive(receives)

    def exchange_checked(self, sends: Tensors, receives: Room, *, counts: Sequence[int]) -> None:
        """As `exchange`, after all ranks were found to tell the same `counts`.

        Raises:
            MismatchError: as there, or they differ; on every rank.
        """
        told = _words(len(counts)).pack(*counts)
        theirs = self._offer(sends, told)
        if any(frame.part != told for frame in theirs.values()):
            raise self._disagreement(f"{self._head.operation} of parts of {list(counts)} bytes")
        self._receive(receives)

    def swap(self, sends: Tensors, receives: Tensors) -> None:
        """All-to-all of any sizes: tensor `r` of `sends` goes to rank r.

        Raises:
            MismatchError: as in `exchange`, or a rank sends another size than one expects; on
                every rank.
        """
        row = [x.nbytes for x in (*sends, *receives)]
        words = _words(len(row))
        told = words.pack(*row)
        theirs = self._offer(sends, told)
        if len({*row}) > 1 or any([frame.part != told for frame in theirs.values()]):
            table = {peer: words.unpack(frame.part) for peer, frame in theirs.items()}
            table[self.rank] = tuple(row)
            wrong = _wrong_sizes(table, self.calls.names)
            if wrong:
                self._disagreement("")
                raise MismatchError(wrong)
        receives[self.rank].copy_(sends[self.rank])
        self._receive(receives)

    def not_all_here(self, missing: Collection[int], gone: Collection[int]) -> CommError:
        """Return the error for ranks that did not come; the engine asks."""
        if gone:
            return PeerFailedError(
                f"{self} failed: connection closed by peer: {self.calls.named(gone)} is gone "
                "(its process ended, or it destroyed the group)"
            )
        return CollectiveTimeoutError(
            f"{self}: Timed out after {self.limit_s:g} s; "
            f"did not arrive: {self.calls.named(missing)}"
        )

    def told(self, notice: Notice) -> CommError:
        """Return the error for a call that a peer gave up; the engine asks."""
        return PeerFailedError(
            f"{self} failed: connection closed by peer: {self.calls.named([notice.peer])} gave up "
            f"in this call ({notice.kind}: {notice.text})"
        )

    def asked(self, peer: int, question: bytes) -> None:
        """Transfers between two ranks go over gloo here, which cannot ask."""

    def __str__(self) -> str:
        return f"{self._head.operation} of group {self.calls.names}"

    def _offer(self, sends: Tensors | None, told: bytes) -> dict[int, Frame]:
        self._step += 1
        payloads = None if sends is None else self._memories(sends)
        cargo = Cargo(parts=[told] * self.size, payloads=payloads)
        frames = self.calls.frames
        theirs = frames.offer(self._signature, step=self._step, cargo=cargo, waiter=self)
        own = (self.number, self._step, self._signature)
        if any((f.number, f.step, f.signature) != own for f in theirs.values()):
            raise self._disagreement(str(self._head))
        return theirs

    def _receive(self, receives: "Tensors | Room | None") -> None:
        if receives is None:
            targets = None
        elif isinstance(receives, Room):
            targets = receives.memory
        else:
            targets = self._memories(receives)
        self.calls.frames.receive(targets, self)

    def _memories(self, tensors: Tensors) -> list[memoryview]:
        """Return the bytes of contiguous tensors, of this rank's own none."""
        own = self.rank
        nothing = memoryview(b"")
        return [nothing if r == own else memory_of(x) for r, x in enumerate(tensors)]

    def _disagreement(self, own: str) -> MismatchError:
        """Hear what all ranks do, and leave the call with them."""
        frames = self.calls.frames
        frames.drop()
        texts = {peer: text.decode() for peer, text in frames.tell(own.encode(), self).items()}
        frames.settle(self.number)
        texts[self.rank] = own
        said = [f"rank {self.calls.names[rank]}: {texts[rank]}" for rank in sorted(texts)]
        return MismatchError("the ranks make different calls: " + "; ".join(said))


@cache
def _words(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}q")


def _wrong_sizes(table: dict[int, tuple[int, ...]], names: Sequence[int]) -> str:
    """Say which rank sends another one more or less than that expects; alike on every rank."""
    size = len(table)
    return "; ".join(
        f"rank {names[src]} sends {table[src][dst]} bytes to rank {names[dst]}, "
        f"which expects {table[dst][size + src]}"
        for src in range(size)
        for dst in range(size)
        if table[src][dst] != table[dst][size + src]
    )
