"""One collective of the backend: which frames its ranks exchange, and what its failure says.

Every rank sends each other one a frame in each step of a call, with what the call is ahead of the
data. So a difference is an error on every rank, before any data has been used, and the group goes
on. A rank that gives up in the middle tells the others, who fail in the same call.

    calls = Calls(streams, names=(0, 1))
    calls.carry_out(Operation(head, lambda call: call.exchange(sends, receives)))
"""

import math
import struct
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple, final

import torch

from comm_collectives.base import DTYPES
from comm_collectives.base.streams import Streams
from comm_collectives.base.transport import SYSTEM_CLOCK
from comm_collectives.call.frames import NO_SIGNATURE, Cargo, Frame, Frames, Notice, memory_of
from comm_collectives.call.groups import Ordered
from comm_collectives.errors import (
    CollectiveTimeoutError,
    CommError,
    MismatchError,
    PeerFailedError,
    RefusedError,
)
from comm_collectives.shm.arguments import Landings, Tensors

_CLOSE_S = 0.1
_HEAD = struct.Struct("<32s4q")
_NO_DTYPE = -1
# gate: clone - unlike in dtype_code, a dtype without a number is no mistake here
_CODE_OF = {dtype: code for code, dtype in enumerate(DTYPES)}
_REDUCTIONS = ("", "sum", "avg", "product", "min", "max", "band", "bor", "bxor")
REFUSED = "refused"


class Head(NamedTuple):
    """One rank's call: operation, dtype, reduction or "", bytes of its tensor, root or -1."""

    operation: str
    dtype: torch.dtype | None = None
    reduction: str = ""
    num_bytes: int = 0
    root: int = -1

    def pack(self) -> bytes:
        """Return what differs between calls that differ."""
        return _HEAD.pack(
            self.operation.encode(),
            _NO_DTYPE if self.dtype is None else _CODE_OF.get(self.dtype, _NO_DTYPE),
            _REDUCTIONS.index(self.reduction),
            self.num_bytes,
            self.root,
        )

    def __str__(self) -> str:
        if self.operation == REFUSED:
            return "refused its own arguments"
        parts = [f"{self.num_bytes} bytes"]
        if self.dtype is not None:
            parts.append(str(self.dtype).removeprefix("torch."))
        if self.reduction:
            parts.append(f"op={self.reduction}")
        if self.root >= 0:
            parts.append(f"root={self.root}")
        return f"{self.operation}({', '.join(parts)})"


@final
class Room:
    """Equally many elements of each rank, by rank, in memory that is kept."""

    def __init__(self, memory: torch.Tensor, count: int, size: int) -> None:
        self.count, self.dtype = count, memory.dtype
        self.tensors = [memory[rank * count : (rank + 1) * count] for rank in range(size)]
        self.memory = [memory_of(row) for row in self.tensors]


@dataclass(slots=True)
class Operation:
    """A collective to be carried out.

    Attributes:
        head: what the ranks compare.
        run: makes it.
        results: the tensors that it fills, as its future gives them.
        landings: (tensor, contiguous stand-in that the operation fills) pairs to copy at the end.
        limit_s: how long a rank waits for the others.
    """

    head: Head
    run: "Callable[[Call], None]"
    results: Tensors = ()
    landings: Landings = field(default_factory=list)
    limit_s: float = math.inf


@final
class Calls(Ordered):
    """The calls of one group on this rank; one at a time."""

    frames: Frames

    def __init__(self, streams: Streams, names: Sequence[int]) -> None:
        super().__init__("of comm_shm", tuple(names))
        self.rank = streams.rank
        self.frames = Frames(streams, SYSTEM_CLOCK)
        self._scratch = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._rows = Room(self._scratch, 0, self.size)
        self._given_up: list[object] = []

    def carry_out(self, operation: Operation) -> None:
        """Make the next call. Collective.

        Raises:
            CommError: it failed; the others are told, unless they know.
        """
        call = Call(self, operation.head, self.next_call(), operation.limit_s)
        try:
            operation.run(call)
        except (MismatchError, RefusedError):
            raise
        except BaseException as error:
            # What has begun to be sent is sent to its end, whenever that is.
            self._given_up.append(operation)
            self.frames.fail(call.number, type(error).__name__, str(error))
            raise
        if operation.landings:
            # Tensors made in inference mode may be written to in no other.
            with torch.inference_mode():
                for tensor, stand_in in operation.landings:
                    tensor.copy_(stand_in)

    def rows(self, count: int, dtype: torch.dtype) -> "Room":
        """Return room for `count` elements of each rank, good until the next call of this."""
        if self._rows.count != count or self._rows.dtype != dtype:
            num_bytes = self.size * count * dtype.itemsize
            if self._scratch.numel() < num_bytes:
                self._scratch = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
            self._rows = Room(self._scratch[:num_bytes].view(dtype), count, self.size)
        return self._rows

    def named(self, ranks: Collection[int]) -> str:
        """Return ranks as words."""
        return ", ".join(f"rank {self.ranks[rank]}" for rank in sorted(ranks))

    def close(self) -> None:
        """Leave the group; a call under way goes on."""
        if self.lock.acquire(timeout=_CLOSE_S):
            self.frames.streams.close()
            self.lock.release()


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
            wrong = _wrong_sizes(table, self.calls.ranks)
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

    def stuck(self, told: Sequence[bytes]) -> None:
        """As torch's own calls, these end at their limit."""

    def go_on(self) -> None:
        """Nothing was told."""

    def __str__(self) -> str:
        return f"{self._head.operation} of group {self.calls.ranks}"

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
        said = [f"rank {self.calls.ranks[rank]}: {texts[rank]}" for rank in sorted(texts)]
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
