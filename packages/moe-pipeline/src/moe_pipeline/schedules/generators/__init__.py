"""The named schedules, each a pure function from sizes to a table, and what they are made with.

Catalogue: schedules.
May import: schedules.table.
"""

from moe_pipeline.schedules.generators.basic import forward_only as forward_only
from moe_pipeline.schedules.generators.basic import forward_then_backward as forward_then_backward
from moe_pipeline.schedules.generators.basic import one_f_one_b as one_f_one_b
from moe_pipeline.schedules.generators.building_block import PERIOD as PERIOD
from moe_pipeline.schedules.generators.building_block import Block as Block
from moe_pipeline.schedules.generators.building_block import rows_of_block as rows_of_block
from moe_pipeline.schedules.generators.catalog import SCHEDULES as SCHEDULES
from moe_pipeline.schedules.generators.dual_pipe import dualpipe as dualpipe
from moe_pipeline.schedules.generators.dual_pipe import dualpipe_v as dualpipe_v
from moe_pipeline.schedules.generators.greedy import Found as Found
from moe_pipeline.schedules.generators.greedy import Policy as Policy
from moe_pipeline.schedules.generators.greedy import Task as Task
from moe_pipeline.schedules.generators.greedy import run_policy as run_policy
from moe_pipeline.schedules.generators.interleaved import interleaved_1f1b as interleaved_1f1b
from moe_pipeline.schedules.generators.interleaved import (
    interleaved_forward_then_backward as interleaved_forward_then_backward,
)
from moe_pipeline.schedules.generators.interleaved import looped_bfs as looped_bfs
from moe_pipeline.schedules.generators.interleaved_zb import (
    interleaved_zero_bubble as interleaved_zero_bubble,
)
from moe_pipeline.schedules.generators.rows import check_sizes as check_sizes
from moe_pipeline.schedules.generators.rows import finish as finish
from moe_pipeline.schedules.generators.v_shaped import v_half as v_half
from moe_pipeline.schedules.generators.v_shaped import v_min as v_min
from moe_pipeline.schedules.generators.v_shaped import zbv as zbv
from moe_pipeline.schedules.generators.zero_bubble import zb_1p as zb_1p
from moe_pipeline.schedules.generators.zero_bubble import zb_2p as zb_2p
