"""A program on many simulated ranks in one process: real collectives, virtual time.

May import: base, call.
"""

from comm_collectives.simulation.alone import stand_alone as stand_alone
from comm_collectives.simulation.run import Outcome as Outcome
from comm_collectives.simulation.run import SimRank as SimRank
from comm_collectives.simulation.run import SimulationResult as SimulationResult
from comm_collectives.simulation.run import Step as Step
from comm_collectives.simulation.run import run_in as run_in
from comm_collectives.simulation.run import simulate as simulate
from comm_collectives.simulation.scheduler import SimulationStuckError as SimulationStuckError
from comm_collectives.simulation.scheduler import Threads as Threads
from comm_collectives.simulation.world import Setting as Setting
