"""Random programs under random faults: right everywhere, or the same error everywhere.

May import: call, collectives, moe, nested, p2p, simulation, faults.
"""

from comm_collectives.simulation.fuzz.fuzzing import FuzzReport as FuzzReport
from comm_collectives.simulation.fuzz.fuzzing import fuzz as fuzz
