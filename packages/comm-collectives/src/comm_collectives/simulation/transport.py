"""The backend of simulated ranks: a store and virtual time, and no device whose data it could move.

All that ranks send each other goes over `SimStreams`.

    transport = SimTransport(world)
"""

from typing import NoReturn, final

from comm_collectives._torch_private import Store
from comm_collectives.base.transport import Transport
from comm_collectives.errors import CommError
from comm_collectives.simulation.scheduler import VirtualClock
from comm_collectives.simulation.world import World


@final
class SimTransport(Transport):
    """The backend of one rank of a simulated group."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.clock = VirtualClock(world.scheduler)
        self.limit_s = world.setting.limit_s

    @property
    def group(self) -> NoReturn:
        """For data on devices, which simulated ranks do not have."""
        raise CommError("simulated ranks have no device; give tensors on the host")

    def store(self) -> Store:
        """Return the store of the simulation, which has what a torch Store has for reports."""
        return self.world.store
