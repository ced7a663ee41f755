"""Run a program on many simulated ranks in one process: real collectives, simulated wires.

Every rank is a thread, exactly one runs at a time, in an order drawn from a seed, in virtual time:
64 ranks that wait for a dead one until their limits pass cost milliseconds, and the same arguments
give the same run. Everything above the streams is the package's own code; see `streams` and
`transport` for what is assumed of the wires.

    def first(rank):
        return cc.all_reduce(torch.ones(3), group=rank.group)

    result = simulate([first, second], 8, faults=FaultSchedule((Kill(rank=3, call=1),)))
    result.outcomes[0].error             # PeerFailedError: ... rank 3 ...

A rank that returns or raises ends its process. Wait only in calls of this package and with
`rank.sleep`: a lock or a socket would stop all ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, final

from comm_collectives.call.agreement import AgreementPolicy
from comm_collectives.call.handles import Caught
from comm_collectives.errors import CommTypeError, CommValueError
from comm_collectives.simulation.faults import FaultSchedule, ZeroTokens
from comm_collectives.simulation.group import SimGroup
from comm_collectives.simulation.scheduler import (
    Hung,
    Scheduler,
    SimulationStuckError,
    Threads,
    Unwound,
)
from comm_collectives.simulation.world import Setting, World

_REAL_LIMIT_S = 120.0
Ending = Literal["returned", "raised", "killed", "hung"]


@final
class SimRank:
    """What a call of the program gets: its rank, and the group of all ranks.

    Attributes:
        memory: kept from call to call, for what one call needs of another.
    """

    def __init__(self, world: World, rank: int) -> None:
        self._world = world
        self.rank = rank
        self.size = world.setting.num_ranks
        self.call = -1
        self.memory: dict[str, object] = {}
        self.group = self.subgroup(range(self.size))

    @property
    def has_tokens(self) -> bool:
        """False where the schedule wants this call to have no data on this rank."""
        faults = self._world.setting.faults.of(self.rank, self.call)
        return not any(isinstance(fault, ZeroTokens) for fault in faults)

    def subgroup(self, ranks: Sequence[int]) -> SimGroup:
        """Return the group of some of the ranks, this one among them; always the same object.

        Not collective: nothing is exchanged.

        Raises:
            ValueError: the ranks do not exist, or this one is not among them.
        """
        return SimGroup.of(self._world, tuple(ranks), self.rank)

    def sleep(self, duration_s: float) -> None:
        """Let virtual time pass on this rank, as a long computation does."""
        self._world.scheduler.sleep(duration_s)


Step = Callable[[SimRank], object]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one rank ended. `values` has what each call returned, None for a call that did not."""

    ending: Ending
    values: tuple[object, ...]
    error: Exception | None = None

    @property
    def survived(self) -> bool:
        """Whether the process ended by itself."""
        return self.ending in ("returned", "raised")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """How all ranks ended, by rank, and when (in virtual time)."""

    outcomes: tuple[Outcome, ...]
    elapsed_s: float

    @property
    def hung(self) -> bool:
        """Whether the ranks would have waited for ever."""
        return any(outcome.ending == "hung" for outcome in self.outcomes)


def simulate(
    program: Sequence[Step] | Step,
    num_ranks: int,
    *,
    faults: FaultSchedule | None = None,
    seed: int = 0,
    shared_memory: bool = True,
    limit_s: float = 2.0,
    agreement: AgreementPolicy | None = None,
) -> SimulationResult:
    """Run a program on simulated ranks. Not collective; needs no process group.

    Args:
        program: the calls that every rank makes in turn, or a single one. Each gets a `SimRank`.
        num_ranks: how many ranks.
        faults: what goes wrong; None means nothing.
        seed: of the order in which ranks run.
        shared_memory: streams have the room of one host, or else of TCP between hosts.
        limit_s: the limit of a transfer without `timeout_s`, in virtual seconds.
        agreement: when ranks compare their calls; None is the package's default.

    Raises:
        ValueError: there are no ranks, the limit is not positive, or a fault is of a rank or call
            that there is not.
        TypeError: an argument is of another type.
        SimulationStuckError: a rank blocks outside of this package's calls.
    """
    if not (callable(program) or isinstance(program, Sequence)):
        raise CommTypeError(f"program is a {type(program).__name__}; give a function, or a list")
    setting = Setting(
        num_ranks=num_ranks,
        faults=FaultSchedule() if faults is None else faults,
        seed=seed,
        shared_memory=shared_memory,
        limit_s=limit_s,
        agreement=AgreementPolicy() if agreement is None else agreement,
    )
    threads = Threads()
    try:
        return run_in(setting, program, threads)
    finally:
        threads.close()


def run_in(setting: Setting, program: Sequence[Step] | Step, threads: Threads) -> SimulationResult:
    """As `simulate`, with threads that are used again."""
    steps = [program] if callable(program) else list(program)
    size = setting.num_ranks
    for fault in setting.faults.faults:
        ranks = {fault.rank, getattr(fault, "peer", 0)}
        if not (ranks <= set(range(size)) and 0 <= fault.call < len(steps)):
            raise CommValueError(
                f"{fault} strikes nobody: there are {size} ranks and {len(steps)} calls, from 0"
            )
    scheduler = Scheduler(seed=setting.seed, threads=threads)
    world = World(scheduler, setting)
    lives = [_Life(world, rank, steps) for rank in range(setting.num_ranks)]
    for life in lives:
        world.spawn(life.rank.rank, life.run)
    try:
        scheduler.run(_REAL_LIMIT_S)
    except SimulationStuckError as error:
        raise SimulationStuckError(f"in {setting}: {error}") from error
    finally:
        world.close()
    return SimulationResult(
        outcomes=tuple(life.outcome() for life in lives), elapsed_s=scheduler.now_s
    )


@final
class _Life:
    """One rank from its first call to the end of its process."""

    def __init__(self, world: World, rank: int, steps: Sequence[Step]) -> None:
        self._world = world
        self._steps = steps
        self._values: list[object] = [None] * len(steps)
        self._ending: Ending = "killed"
        self._error: Exception | None = None
        self.rank = SimRank(world, rank)

    def run(self) -> None:
        """Make the calls in the order that the schedule wants."""
        try:
            self._make_calls()
            self._ending = "returned" if self._error is None else "raised"
        except Hung:
            self._ending = "hung"
        except Unwound:
            self._ending = "killed"
        finally:
            self._world.bury(self.rank.rank)

    def outcome(self) -> Outcome:
        """What became of it."""
        return Outcome(ending=self._ending, values=tuple(self._values), error=self._error)

    def _make_calls(self) -> None:
        world, rank = self._world, self.rank
        with Caught(Exception) as caught:
            for call in world.setting.faults.order(rank.rank, len(self._steps)):
                rank.call = call
                world.enter(rank.rank, call)
                self._values[call] = self._steps[call](rank)
                world.leave(rank.rank)
        if isinstance(caught.error, Exception):
            self._error = caught.error
            world.tear_down()
