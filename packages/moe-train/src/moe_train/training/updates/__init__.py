"""Which ranks sum gradients, and which of them update what.

May import: config, layout, model, optim, parallel, training.pipelines, errors; moe_pipeline.
"""

from moe_train.training.updates.groups import groups_of_job as groups_of_job
from moe_train.training.updates.groups import layouts_shared_out as layouts_shared_out
from moe_train.training.updates.groups import parameter_groups as parameter_groups
from moe_train.training.updates.groups import stage_blocks as stage_blocks
from moe_train.training.updates.groups import state_options as state_options
