"""What the ranks of a pipeline share: process groups, tied parameters, the number of tokens.

May import: comm_collectives.
"""

from moe_pipeline.executor.groups.pipeline_groups import (
    make_pipeline_groups as make_pipeline_groups,
)
from moe_pipeline.executor.groups.tied import TiedParameters as TiedParameters
from moe_pipeline.executor.groups.token_scale import token_scale as token_scale
