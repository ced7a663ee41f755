"""NCCL's order as a machine of states: who has queued what, what may run, what never will.

Every rank has queues, one per communicator and stream of it (`lane`). Only the head of a queue has
been launched. A send ends when its bytes fit into the buffer of its channel or when the receive
has been launched; a receive when the send has been; a collective when all ranks have launched it.
Nothing here waits, sends or knows processes: `exchange` does.

    referee = Referee()
    referee.post(Item(number=1, rank=0, comm=comm, lane="0-1", parts=(send,), where="a.py:3"))
    referee.done          # what ended since, with what it brought
    referee.stuck()       # "" or who waits for whom, for ever
"""

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from devicetest.nccl.arithmetic import combine

Channel = tuple[str, str, int, int]  # communicator, lane, sender, receiver


@dataclass(frozen=True, slots=True, kw_only=True)
class Comm:
    """A communicator as a rank sees it: its name, its ranks in the world, what it may keep.

    `is_silent`: what is wrong is not told, it never ends. `queue`: the line in which its calls wait
    with those of others; "" is one of its own.
    """

    name: str
    ranks: tuple[int, ...]
    buffer_bytes: float
    is_silent: bool = False
    queue: str = ""

    def line(self, lane: str) -> tuple[str, str]:
        """The line in which a call of a lane waits."""
        return (self.queue, "") if self.queue else (self.name, lane)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One transfer or collective.

    Attributes:
        kind: "send", "recv", or the collective's name.
        peer: the other rank, in the world's numbers; -1 for a collective.
        num_bytes: of the message.
        terms: what all ranks of a collective must have in common.
        chunks: what this rank gives.
        expected: bytes of each chunk that it gets, in an all-to-all.
    """

    kind: str
    peer: int = -1
    num_bytes: int = 0
    terms: tuple[object, ...] = ()
    chunks: tuple[bytes, ...] = ()
    expected: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.kind == "send":
            return f"send of {self.num_bytes} bytes to rank {self.peer}"
        if self.kind == "recv":
            return f"recv of {self.num_bytes} bytes from rank {self.peer}"
        return f"{self.kind}{self.terms}"


@dataclass(slots=True, kw_only=True, eq=False)
class Item:
    """What one rank launches at once: an operation, or a batch of them.

    Attributes:
        device: where its tensors lie; no two ranks of a communicator may share one.
        brought: for each part that has ended what it brings.
    """

    number: int
    rank: int
    comm: Comm
    lane: str
    parts: tuple[Part, ...]
    where: str
    device: str = ""
    brought: dict[int, list[bytes]] = field(default_factory=dict)

    def __str__(self) -> str:
        what = ", ".join(map(str, self.parts))
        return f"{'batch of ' if len(self.parts) > 1 else ''}{what} at {self.where}"


@dataclass(slots=True)
class Launched:
    """Transfers of one channel whose other side has not been launched; buffered bytes."""

    sends: deque[tuple[Item, int]] = field(default_factory=deque)
    receives: deque[tuple[Item, int]] = field(default_factory=deque)
    kept_bytes: int = 0


class Referee:
    """Runs what all ranks have queued.

    Attributes:
        done: items that have ended; the caller takes them out.
        fault: what went wrong for good; "" while nothing has.
        channels: launched transfers whose other side is not, and what is in the buffers.
        rounds: communicator -> for each of its collectives who has launched it.
        entered: (communicator, rank) -> collectives launched so far.
    """

    def __init__(self) -> None:
        self.done: list[Item] = []
        self.fault = ""
        self._queues: dict[tuple[str, str, int], deque[Item]] = defaultdict(deque)
        self.channels: dict[Channel, Launched] = defaultdict(Launched)
        self.rounds: dict[str, list[dict[int, tuple[Item, int]]]] = defaultdict(list)
        self.entered: dict[tuple[str, int], int] = defaultdict(int)
        self._devices: dict[str, dict[str, int]] = defaultdict(dict)

    def post(self, item: Item) -> None:
        """Queue an item; launch it, and whatever that lets go on, if it may be."""
        if item.device:
            owner = self._devices[item.comm.name].setdefault(item.device, item.rank)
            if owner != item.rank:
                self._fail(
                    f"ranks {owner} and {item.rank} of one communicator are both on {item.device}: "
                    "NCCL refuses two ranks on one device (Duplicate GPU detected)"
                )
                return
        queue = self._queues[(*item.comm.line(item.lane), item.rank)]
        queue.append(item)
        if len(queue) == 1:
            self._launch(item)

    def items(self) -> Iterator[Item]:
        """Yield what has not ended, each queue in order."""
        for queue in self._queues.values():
            yield from queue

    # ------------------------------------------------------------------ what runs

    def _launch(self, item: Item) -> None:
        for index, part in enumerate(item.parts):
            if part.peer < 0:
                self._enter(item, index)
                continue
            sends = part.kind == "send"
            ends = (item.rank, part.peer) if sends else (part.peer, item.rank)
            channel = self.channels[item.comm.name, item.lane, *ends]
            (channel.sends if sends else channel.receives).append((item, index))
            self._keep(channel)
            self._match(channel)

    def _keep(self, channel: Launched) -> None:
        """Put sends that wait into the channel's buffer, the first first, as far as they fit."""
        for item, index in list(channel.sends):
            size, limit = item.parts[index].num_bytes, item.comm.buffer_bytes
            if index in item.brought or size > limit:
                continue
            if channel.kept_bytes + size > limit:
                return
            channel.kept_bytes += size
            self._end(item, index, [])

    def _match(self, channel: Launched) -> None:
        while channel.sends and channel.receives:
            (sender, at), (receiver, to) = channel.sends.popleft(), channel.receives.popleft()
            given, wanted = sender.parts[at], receiver.parts[to]
            if given.num_bytes != wanted.num_bytes:
                if sender.comm.is_silent:
                    return
                self._fail(
                    f"rank {receiver.rank} wants {wanted.num_bytes} bytes of rank {sender.rank} "
                    f"({receiver.where}), which sends {given.num_bytes} ({sender.where})"
                )
            if at in sender.brought:
                channel.kept_bytes -= given.num_bytes
                self._keep(channel)
            else:
                self._end(sender, at, [])
            self._end(receiver, to, list(given.chunks))

    def _enter(self, item: Item, index: int) -> None:
        key = (item.comm.name, item.rank)
        rounds, number = self.rounds[item.comm.name], self.entered[key]
        self.entered[key] += 1
        if number == len(rounds):
            rounds.append({})
        seats = rounds[number]
        seats[item.rank] = (item, index)
        part = item.parts[index]
        for other, at in seats.values():
            if (other.parts[at].kind, other.parts[at].terms) != (part.kind, part.terms):
                if item.comm.is_silent:
                    return
                self._fail(
                    f"collective {number} of a communicator differs: rank {other.rank} is in "
                    f"{other.parts[at]} ({other.where}), rank {item.rank} in {part} ({item.where})"
                )
        if len(seats) < len(item.comm.ranks):
            return
        given = [seats[rank][0].parts[seats[rank][1]].chunks for rank in item.comm.ranks]
        rounds[number] = {}
        for place, rank in enumerate(item.comm.ranks):
            owner, at = seats[rank]
            brought = combine(part.kind, part.terms, given, place)
            expected = owner.parts[at].expected
            if expected and tuple(map(len, brought)) != expected:
                if owner.comm.is_silent:
                    continue
                self._fail(
                    f"rank {rank} expects {expected} bytes of the ranks {item.comm.ranks} in "
                    f"{part.kind} ({owner.where}), they send {tuple(map(len, brought))}"
                )
            self._end(owner, at, brought)

    def _end(self, item: Item, index: int, brought: list[bytes]) -> None:
        item.brought[index] = brought
        if len(item.brought) < len(item.parts):
            return
        self.done.append(item)
        queue = self._queues[(*item.comm.line(item.lane), item.rank)]
        queue.popleft()
        if queue:
            self._launch(queue[0])

    def _fail(self, text: str) -> None:
        self.fault = self.fault or text
