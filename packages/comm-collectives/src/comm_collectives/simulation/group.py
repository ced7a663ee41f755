"""The groups of simulated ranks, which every function of this package takes as `group`.

group = SimGroup.of(world, ranks=(0, 2, 5), rank=2)
comm_collectives.all_reduce(x, group=group)
"""

# gate: late-attribute - what a group learns in its first calls, a simulated one has from the start

import threading
from typing import cast, final

from comm_collectives.call.frames import Frames
from comm_collectives.call.groups import CustomGroup, GroupState
from comm_collectives.errors import CommValueError
from comm_collectives.simulation.streams import SimStreams
from comm_collectives.simulation.transport import SimTransport
from comm_collectives.simulation.worker import SimWorker
from comm_collectives.simulation.world import World

# Ranks answer for dropped graphs in their own next call; a thread outside would not be simulated.
_NO_RESPONDER = threading.Thread(name="simulated ranks have none")
_STAGED_BYTES = 1 << 9  # for each of the ranks' ranks


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
    index = ranks.index(rank)
    transport = SimTransport(world)
    state = GroupState(
        rank=index,
        ranks=ranks,
        name=f"simulated {','.join(map(str, ranks))}",
        transport=transport,
        backend_of={"cpu": "simulated"},
        groups=lambda: _states_of(world, rank),
    )
    state.policy = world.setting.agreement
    state.worker, state.hire = SimWorker(world, rank), lambda: SimWorker(world, rank)
    state.responder = _NO_RESPONDER
    state.opener = lambda lane: SimStreams(world, ranks=ranks, index=index, lane=lane)
    state.frames = Frames(state.opener("calls"), transport.clock, staged_bytes=_STAGED_BYTES)
    return state


def _states_of(world: World, rank: int) -> list[GroupState]:
    """All groups of a rank, which the other members may have made use of first."""
    made = {ranks for ranks, _ in world.groups if rank in ranks}
    return [SimGroup.of(world, ranks, rank).state() for ranks in sorted(made)]
