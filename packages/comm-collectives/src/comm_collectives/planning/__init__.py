"""Which route and payload to choose for MoE rows: counted bytes and a cost model, without torch.

May import: wire.
"""

from comm_collectives.planning.cost_model import CostCurve as CostCurve
from comm_collectives.planning.plan_command import add_plan_arguments as add_plan_arguments
from comm_collectives.planning.plan_command import run_plan as run_plan
from comm_collectives.planning.planner import bytes_for_routing as bytes_for_routing
from comm_collectives.planning.planner import plan_dispatch as plan_dispatch
from comm_collectives.planning.topology import topology_preset as topology_preset
from comm_collectives.planning.workload import Payload as Payload
from comm_collectives.planning.workload import Workload as Workload
