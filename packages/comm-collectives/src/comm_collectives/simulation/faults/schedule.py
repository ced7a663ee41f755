"""What goes wrong in a simulated run, as plain data: print it, store it, run it again.

A program is a list of calls. A fault names the rank, the call by its place in that list, and where
it strikes inside the call, the transport operation: 0 is before the call does anything, 1 the first
message or control exchange, and so on; behind the last one is the end of the call.

    faults = FaultSchedule((Kill(rank=3, call=1, operation=2), Delay(rank=0, call=0, delay_s=0.2)))
    faults = FaultSchedule.random(seed=7, num_ranks=16, num_calls=5)
    print(faults)            # the expression that makes it
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import final

from comm_collectives.errors import CommTypeError, CommValueError

_MAX_FAULTS = 4
_MAX_OPERATION = 4
_LATE_S = 0.5  # together the late ranks of a schedule stay within a limit of 2 s ...
_TOO_LATE_S = 10.0  # ... or some are late by anything, or come when all others have given up
_MUCH_TOO_LATE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that happens to one rank in one call."""

    rank: int
    call: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Delay(Fault):
    """The rank is late by `delay_s` of virtual time with an operation."""

    operation: int = 0
    delay_s: float

    def __post_init__(self) -> None:
        if not self.delay_s >= 0:
            raise CommValueError(f"delay_s={self.delay_s} must be at least 0")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Kill(Fault):
    """The process ends in an operation, whose message still goes out to the first `reached` peers.

    In shared memory a message reaches all peers or none.
    """

    operation: int = 0
    reached: int = 0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Skip(Fault):
    """The rank leaves the call out."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Reorder(Fault):
    """The rank makes this call after the next one."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Truncate(Fault):
    """The message of an operation arrives cut short at `peer`: the connection breaks in the middle.

    Both ranks live on. No effect in shared memory, where nothing can be cut.
    """

    operation: int = 1
    peer: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroTokens(Fault):
    """The rank has no data in this call: no failure, but the case that programs forget."""


@final
@dataclass(frozen=True, slots=True)
class FaultSchedule:
    """The faults of one run; empty means that all goes well."""

    faults: tuple[Fault, ...] = ()

    def __post_init__(self) -> None:
        faults = self.faults if isinstance(self.faults, tuple | list) else (None,)
        if not all(isinstance(fault, Fault) for fault in faults):
            raise CommTypeError(f"faults={self.faults!r}; give a tuple of Kill, Delay and others")

    @staticmethod
    def random(seed: int, num_ranks: int, num_calls: int) -> "FaultSchedule":
        """Draw up to four faults for the first `num_calls` calls of a program. Pure.

        One in four schedules holds only late ranks and ranks without data, so all must end well
        there if the limit of a call is above 2 s.

        Raises:
            ValueError: fewer than two ranks, or no calls.
        """
        if num_ranks < 2 or num_calls < 1:
            raise CommValueError(
                f"num_ranks={num_ranks}, num_calls={num_calls}; give at least 2 ranks and 1 call"
            )
        chance = Random(seed)
        draws = _GENTLE if chance.random() < 0.25 else _ALL
        faults = []
        for _ in range(chance.randint(1, _MAX_FAULTS)):
            draw = chance.choice(draws)
            rank, call = chance.randrange(num_ranks), chance.randrange(num_calls)
            faults.append(draw(chance, rank, call, num_ranks))
        return FaultSchedule(tuple(faults))

    def of(self, rank: int, call: int) -> list[Fault]:
        """Return what happens to a rank in a call."""
        return [fault for fault in self.faults if (fault.rank, fault.call) == (rank, call)]

    def order(self, rank: int, num_calls: int) -> list[int]:
        """Return the calls that a rank makes, in the order in which it makes them."""
        order = list(range(num_calls))
        for fault in self.faults:
            if isinstance(fault, Reorder) and fault.rank == rank and fault.call + 1 < num_calls:
                at = fault.call
                order[at], order[at + 1] = order[at + 1], order[at]
        left_out = {f.call for f in self.faults if isinstance(f, Skip) and f.rank == rank}
        return [call for call in order if call not in left_out]

    def without(self, fault: Fault) -> "FaultSchedule":
        """Return the schedule without one of its faults."""
        at = self.faults.index(fault)
        return FaultSchedule(self.faults[:at] + self.faults[at + 1 :])

    def __len__(self) -> int:
        return len(self.faults)


_Draw = Callable[[Random, int, int, int], Fault]


def _late(chance: Random, rank: int, call: int, _num_ranks: int) -> Fault:
    delay_s = round(chance.uniform(0.0, _LATE_S), 3)
    return Delay(rank=rank, call=call, operation=chance.randint(0, _MAX_OPERATION), delay_s=delay_s)


def _too_late(chance: Random, rank: int, call: int, _num_ranks: int) -> Fault:
    operation = chance.randint(0, _MAX_OPERATION)
    delay_s = round(chance.uniform(_LATE_S, _TOO_LATE_S), 3)
    if chance.random() < 0.25:
        delay_s = _MUCH_TOO_LATE_S
    return Delay(rank=rank, call=call, operation=operation, delay_s=delay_s)


def _kill(chance: Random, rank: int, call: int, num_ranks: int) -> Fault:
    operation, reached = chance.randint(0, _MAX_OPERATION), 0
    if chance.random() < 0.5:
        reached = chance.randint(1, num_ranks - 1)
    return Kill(rank=rank, call=call, operation=operation, reached=reached)


def _truncate(chance: Random, rank: int, call: int, num_ranks: int) -> Fault:
    peer = (rank + chance.randrange(1, num_ranks)) % num_ranks
    return Truncate(rank=rank, call=call, operation=chance.randint(1, _MAX_OPERATION), peer=peer)


_GENTLE: tuple[_Draw, ...] = (
    _late,
    lambda chance, rank, call, num_ranks: ZeroTokens(rank=rank, call=call),
)
_ALL: tuple[_Draw, ...] = (
    *_GENTLE,
    _too_late,
    _kill,
    _truncate,
    lambda chance, rank, call, num_ranks: Skip(rank=rank, call=call),
    lambda chance, rank, call, num_ranks: Reorder(rank=rank, call=call),
)
