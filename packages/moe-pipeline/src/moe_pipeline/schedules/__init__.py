"""Pipeline schedules as data: made, planned, checked and simulated without a process.

The named ones come from the catalogue `schedules.generators`.

May import: no room.
"""

from moe_pipeline.errors import ScheduleError as ScheduleError
from moe_pipeline.schedules.generators import SCHEDULES as SCHEDULES
from moe_pipeline.schedules.generators import dualpipe as dualpipe
from moe_pipeline.schedules.generators import dualpipe_v as dualpipe_v
from moe_pipeline.schedules.generators import forward_only as forward_only
from moe_pipeline.schedules.generators import forward_then_backward as forward_then_backward
from moe_pipeline.schedules.generators import interleaved_1f1b as interleaved_1f1b
from moe_pipeline.schedules.generators import (
    interleaved_forward_then_backward as interleaved_forward_then_backward,
)
from moe_pipeline.schedules.generators import interleaved_zero_bubble as interleaved_zero_bubble
from moe_pipeline.schedules.generators import looped_bfs as looped_bfs
from moe_pipeline.schedules.generators import one_f_one_b as one_f_one_b
from moe_pipeline.schedules.generators import v_half as v_half
from moe_pipeline.schedules.generators import v_min as v_min
from moe_pipeline.schedules.generators import zb_1p as zb_1p
from moe_pipeline.schedules.generators import zb_2p as zb_2p
from moe_pipeline.schedules.generators import zbv as zbv
from moe_pipeline.schedules.planner import plan as plan
from moe_pipeline.schedules.table import Action as Action
from moe_pipeline.schedules.table import Kind as Kind
from moe_pipeline.schedules.table import Problem as Problem
from moe_pipeline.schedules.table import Schedule as Schedule
from moe_pipeline.schedules.table import Simulation as Simulation
from moe_pipeline.schedules.table import StageCosts as StageCosts
from moe_pipeline.schedules.table import add_transfers as add_transfers
from moe_pipeline.schedules.table import check as check
from moe_pipeline.schedules.table import simulate as simulate
from moe_pipeline.schedules.views import format_schedule as format_schedule
