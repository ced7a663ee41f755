"""What the ranks of a pipeline hold, do and send in a step.

May import: config, layout, model, parallel, errors, training.experts; comm_collectives, mesh_spmd,
moe_pipeline.
"""

from moe_train.training.pipelines.pipeline import counted_costs as counted_costs
from moe_train.training.pipelines.pipeline import forwards_of as forwards_of
from moe_train.training.pipelines.pipeline import layers_of_stages as layers_of_stages
from moe_train.training.pipelines.pipeline import schedule_of_costs as schedule_of_costs
from moe_train.training.pipelines.pipeline import training_schedule as training_schedule
from moe_train.training.pipelines.pipeline import unmeasured_schedule as unmeasured_schedule
from moe_train.training.pipelines.rank_stages import RankStages as RankStages
from moe_train.training.pipelines.traffic import Traffic as Traffic
from moe_train.training.pipelines.traffic import step_traffic as step_traffic
from moe_train.training.pipelines.traffic import traffic_table as traffic_table
