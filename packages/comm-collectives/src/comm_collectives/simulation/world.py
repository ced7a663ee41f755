"""What the ranks of one simulation share: who lives, which connections hold, when a fault strikes.

world = World(scheduler, Setting(num_ranks=8, faults=faults))
world.enter(rank=3, call=0)        # may delay this rank, or end it
post = world.operate(rank=3)       # a transport operation of this call begins
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, final

from comm_collectives._torch_private import HashStore
from comm_collectives.call.agreement import AgreementPolicy
from comm_collectives.call.groups import check_integer
from comm_collectives.errors import CommTypeError, CommValueError
from comm_collectives.simulation.faults import Delay, FaultSchedule, Kill, Truncate
from comm_collectives.simulation.scheduler import Scheduler, Signal, Task, Unwound

_ROOM_BYTES = {True: 1 << 20, False: 1 << 16}  # of a stream, on one host or between hosts
_TEARDOWN_S = 0.2  # longest time from an exception to the end of the process


class Killed(Unwound):
    """Ends a rank as a signal ends a process."""


@final
@dataclass(frozen=True, slots=True)
class Post:
    """How the messages of one operation leave: all, or what a fault lets through."""

    reached: int | None = None
    cut_at: int | None = None


_WHOLE = Post()
_Timed = Delay | Kill | Truncate


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Where a program runs: everything that decides a run but the program.

    Attributes:
        seed: of the order in which ranks run.
        shared_memory: streams have the room of one host, or else of TCP between hosts.
        limit_s: the group's own limit, in virtual seconds.
    """

    num_ranks: int
    faults: FaultSchedule = field(default_factory=FaultSchedule)
    seed: int = 0
    shared_memory: bool = True
    limit_s: float = 2.0
    agreement: AgreementPolicy = field(default_factory=AgreementPolicy)

    def __post_init__(self) -> None:
        check_integer(self.num_ranks, "num_ranks")
        kinds = (("faults", FaultSchedule), ("agreement", AgreementPolicy), ("limit_s", Real))
        for name, kind in kinds:
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise CommTypeError(f"{name} is a {type(value).__name__}; give a {kind.__name__}")
        if self.num_ranks < 1 or not self.limit_s > 0:
            raise CommValueError(
                f"num_ranks={self.num_ranks}, limit_s={self.limit_s}; give at least one rank and a "
                "positive limit"
            )


@final
class Pipes:
    """The bytes under way between ranks, and the connections that have ended; ranks by place."""

    def __init__(self, size: int, capacity: int) -> None:
        self.capacity = capacity
        self.signals = [Signal() for _ in range(size)]
        self.awaited: list[set[int]] = [set() for _ in range(size)]  # before a waiting rank looks
        self.ended: list[set[int]] = [set() for _ in range(size)]
        self.under_way = [[bytearray() for _ in range(size)] for _ in range(size)]  # to, from

    def end(self, one: int, other: int) -> None:
        """End the connection of two ranks; what was sent before can still be received."""
        self.ended[one].add(other)
        self.ended[other].add(one)

    def leave(self, rank: int) -> None:
        """End all connections of a rank."""
        for other in range(len(self.signals)):
            if other != rank:
                self.end(rank, other)


@final
class World:
    """Ranks are global numbers here."""

    def __init__(self, scheduler: Scheduler, setting: Setting) -> None:
        num_ranks = setting.num_ranks
        self.scheduler = scheduler
        self.setting = setting
        self.store = HashStore()
        self.dead: set[int] = set()
        self.groups: dict[tuple[tuple[int, ...], int], Any] = {}  # by members and member
        self._doomed: set[int] = set()  # that end in the operation under way
        self._operations = [0] * num_ranks
        self._faults: list[list[_Timed]] = [[] for _ in range(num_ranks)]  # of the call under way
        self._tasks: list[list[Task]] = [[] for _ in range(num_ranks)]
        self._pipes: dict[tuple[tuple[int, ...], str], Pipes] = {}

    def spawn(self, rank: int, run: Callable[[], None]) -> Task:
        """Start a thread of a rank, which ends with its process."""
        task = self.scheduler.spawn(run, f"simulated rank {rank}")
        self._tasks[rank].append(task)
        return task

    def pipes(self, ranks: tuple[int, ...], lane: str) -> Pipes:
        """Return what the members of a group have in common for a kind of message."""
        pipes = self._pipes.get((ranks, lane))
        if pipes is None:
            room_bytes = _ROOM_BYTES[self.setting.shared_memory]
            pipes = self._pipes[ranks, lane] = Pipes(len(ranks), room_bytes)
            for rank in self.dead.intersection(ranks):
                pipes.leave(ranks.index(rank))
        return pipes

    def enter(self, rank: int, call: int) -> None:
        """Begin a call of the program; its operation 0."""
        self._operations[rank] = 0
        faults = self.setting.faults.of(rank, call)
        self._faults[rank] = [f for f in faults if isinstance(f, _Timed)]
        self._strike(rank, 0)

    def leave(self, rank: int) -> None:
        """End a call; what should have struck later strikes now."""
        if self._faults[rank]:
            ends = [f for f in self._faults[rank] if isinstance(f, Delay | Kill)]
            for operation in sorted({f.operation for f in ends}):
                self._strike(rank, operation)
        if rank in self._doomed:
            self.die(rank)

    def operate(self, rank: int) -> Post:
        """Begin an operation of `rank`: perhaps late, perhaps its last.

        Behind the peers that a Post has `reached` follows `die`, at the latest at the call's end.
        """
        if rank in self.dead:
            raise Killed(f"the process of rank {rank} has ended")
        self._operations[rank] += 1
        if not self._faults[rank]:
            return _WHOLE
        return self._strike(rank, self._operations[rank])

    def die(self, rank: int) -> None:
        """End a rank at once.

        Raises:
            Killed: always.
        """
        self.bury(rank)
        raise Killed(f"rank {rank} was killed")

    def bury(self, rank: int, reason: Unwound | None = None) -> None:
        """Close the connections of a rank whose process is over, and end its other threads."""
        if rank not in self.dead:
            self.dead.add(rank)
            for task in self._tasks[rank]:
                doom = reason or Killed(f"the process of rank {rank} has ended")
                self.scheduler.unwind(task, doom)
            for (ranks, _), pipes in self._pipes.items():
                if rank in ranks:
                    pipes.leave(ranks.index(rank))
            self.notify()

    def close(self) -> None:
        """Let go of the groups, which hold the world: a run leaves little for the collector."""
        self.groups.clear()
        self._pipes.clear()
        for tasks in self._tasks:
            tasks.clear()

    def tear_down(self) -> None:
        """Let pass what lies between an exception and the end of its process."""
        self.scheduler.sleep(_TEARDOWN_S * self.scheduler.draw())

    def notify(self) -> None:
        """Have every waiting operation look again."""
        for pipes in self._pipes.values():
            for signal in pipes.signals:
                self.scheduler.fire(signal)

    def _strike(self, rank: int, operation: int) -> Post:
        """Apply the faults of this operation; those at the end of a call have no message."""
        post = _WHOLE
        for fault in list(self._faults[rank]):
            if fault.operation == operation:
                self._faults[rank].remove(fault)
                post = self._apply(fault, post)
        return post

    def _apply(self, fault: _Timed, post: Post) -> Post:
        if isinstance(fault, Delay):
            self.scheduler.sleep(fault.delay_s)
            return post
        if isinstance(fault, Truncate):
            return Post(post.reached, fault.peer)
        if fault.reached == 0 or fault.operation == 0:
            self.die(fault.rank)
        self._doomed.add(fault.rank)
        return Post(fault.reached, post.cut_at)
