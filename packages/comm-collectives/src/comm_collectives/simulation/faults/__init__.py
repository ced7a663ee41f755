"""What goes wrong in a simulated run, as data, and shrinking it to what is needed.

May import: no other room.
"""

from comm_collectives.simulation.faults.schedule import Delay as Delay
from comm_collectives.simulation.faults.schedule import FaultSchedule as FaultSchedule
from comm_collectives.simulation.faults.schedule import Kill as Kill
from comm_collectives.simulation.faults.schedule import Reorder as Reorder
from comm_collectives.simulation.faults.schedule import Truncate as Truncate
from comm_collectives.simulation.faults.schedule import ZeroTokens as ZeroTokens
from comm_collectives.simulation.faults.shrinking import Scenario as Scenario
from comm_collectives.simulation.faults.shrinking import shrink as shrink
