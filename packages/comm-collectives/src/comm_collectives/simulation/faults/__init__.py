"""The room `faults`."""

from comm_collectives.simulation.faults.schedule import Delay as Delay
from comm_collectives.simulation.faults.schedule import FaultSchedule as FaultSchedule
from comm_collectives.simulation.faults.schedule import Kill as Kill
from comm_collectives.simulation.faults.schedule import Truncate as Truncate
from comm_collectives.simulation.faults.schedule import ZeroTokens as ZeroTokens
from comm_collectives.simulation.faults.shrinking import Scenario as Scenario
from comm_collectives.simulation.faults.shrinking import shrink as shrink
