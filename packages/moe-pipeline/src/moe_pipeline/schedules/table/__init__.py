"""The room `table`."""

from moe_pipeline.schedules.table.checker import Problem as Problem
from moe_pipeline.schedules.table.checker import check as check
from moe_pipeline.schedules.table.costs import StageCosts as StageCosts
from moe_pipeline.schedules.table.costs import costs_of_stages as costs_of_stages
from moe_pipeline.schedules.table.rows import check_sizes as check_sizes
from moe_pipeline.schedules.table.rows import finish as finish
from moe_pipeline.schedules.table.rows import folded_rank as folded_rank
from moe_pipeline.schedules.table.schedule import COMPUTE as COMPUTE
from moe_pipeline.schedules.table.schedule import Action as Action
from moe_pipeline.schedules.table.schedule import Kind as Kind
from moe_pipeline.schedules.table.schedule import Schedule as Schedule
from moe_pipeline.schedules.table.schedule import add_transfers as add_transfers
from moe_pipeline.schedules.table.simulator import Simulation as Simulation
from moe_pipeline.schedules.table.simulator import Span as Span
from moe_pipeline.schedules.table.simulator import simulate as simulate
