"""A schedule as data, and what is known of it without running it: correctness, time, memory.

May import: no room.
"""

from moe_pipeline.schedules.table.checker import Problem as Problem
from moe_pipeline.schedules.table.checker import check as check
from moe_pipeline.schedules.table.costs import StageCosts as StageCosts
from moe_pipeline.schedules.table.costs import costs_of_stages as costs_of_stages
from moe_pipeline.schedules.table.schedule import COMPUTE as COMPUTE
from moe_pipeline.schedules.table.schedule import Action as Action
from moe_pipeline.schedules.table.schedule import Kind as Kind
from moe_pipeline.schedules.table.schedule import Schedule as Schedule
from moe_pipeline.schedules.table.schedule import add_transfers as add_transfers
from moe_pipeline.schedules.table.simulator import Simulation as Simulation
from moe_pipeline.schedules.table.simulator import Span as Span
from moe_pipeline.schedules.table.simulator import simulate as simulate
