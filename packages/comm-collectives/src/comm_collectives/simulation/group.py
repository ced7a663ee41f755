"""The groups of simulated ranks, which every function of this package takes as `group`.

group = SimGroup.of(world, ranks=(0, 2, 5), rank=2)
comm_collectives.all_reduce(x, group=group)
"""

# gate: late-attribute - what a group learns in its first calls, a simulated one has from the start

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast, final

from comm_collectives.call.frames import Frames
from comm_collectives.call.groups import CustomGroup, GroupState
from comm_collectives.call.pairs import Lane
from comm_collectives.errors import CommValueError
from comm_collectives.simulation.scheduler import Signal
from comm_collectives.simulation.streams import Pipes, SimStreams
from comm_collectives.simulation.transport import SimTransport
from comm_collectives.simulation.worker import SimWorker
from comm_collectives.simulation.world import World

# Ranks answer for dropped graphs in their own next call; a thread outside would not be simulated.
_NO_RESPONDER = threading.Thread(name="simulated ranks have none")
_STAGED_BYTES = 1 << 10  # for each of the ranks' ranks
_ROOM_BYTES = {True: 1 << 20, False: 1 << 16}  # of a stream, on one host or between hosts


@final
@dataclass(frozen=True, slots=True)
class _Shared:
    """What the ranks of one group share."""

    pipes: Pipes
    pairs: Pipes

    def signals(self) -> Iterator[Signal]:
        """Yield everything that somebody may wait for."""
        yield from self.pipes.signals
        yield from self.pairs.signals


@final
class SimGroup(CustomGroup):
    """A group of simulated ranks, as one of them sees it."""

    def __init__(self, state: GroupState) -> None:
        self._state = state

    @staticmethod
    def of(world: World, ranks: tuple[int, ...], rank: int) -> "SimGroup":
        """Return the group of these ranks on `rank`; always the same object.

        Raises:
            ValueError: the ranks do not exist, or `rank` is not among them.
        """
        known = world.groups.get((ranks, rank))
        if known is None:
            if rank not in ranks or len(set(ranks)) != len(ranks):
                raise CommValueError(f"ranks={ranks} must hold rank {rank} and each rank once")
            if not all(0 <= other < world.setting.num_ranks for other in ranks):
                raise CommValueError(
                    f"ranks={ranks}; give ranks in 0..{world.setting.num_ranks - 1}"
                )
            known = world.groups[ranks, rank] = SimGroup(_new_state(world, ranks, rank))
        return cast(SimGroup, known)

    def state(self) -> GroupState:
        """Return what this rank knows of the group."""
        return self._state

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members, in the order of their numbers inside the group."""
        return self._state.ranks


def _new_state(world: World, ranks: tuple[int, ...], rank: int) -> GroupState:
    shared = world.shared.get(ranks)
    if shared is None:
        room_bytes = _ROOM_BYTES[world.setting.shared_memory]
        pipes, pairs = (Pipes(len(ranks), room_bytes) for _ in range(2))
        shared = world.shared[ranks] = _Shared(pipes, pairs)
        _watch(world, ranks, shared)
    index = ranks.index(rank)
    transport = SimTransport(world)
    state = GroupState(
        rank=index,
        ranks=ranks,
        name=f"simulated {','.join(map(str, ranks))}",
        transport=transport,
        backend_of={"cpu": "simulated"},
    )
    state.policy = world.setting.agreement
    state.worker = SimWorker(world, rank)
    state.responder = _NO_RESPONDER
    streams = SimStreams(shared.pipes, world, ranks=ranks, index=index)
    state.frames = Frames(streams, transport.clock, staged_bytes=_STAGED_BYTES)
    beside = SimStreams(shared.pairs, world, ranks=ranks, index=index)
    state.lane = Lane(state, beside, has_helper=False)
    return state


def _watch(world: World, ranks: tuple[int, ...], shared: _Shared) -> None:
    def leave(rank: int) -> None:
        if rank in ranks:
            shared.pipes.leave(ranks.index(rank))
            shared.pairs.leave(ranks.index(rank))

    for rank in sorted(world.dead):
        leave(rank)
    world.watch(shared.signals, leave)
