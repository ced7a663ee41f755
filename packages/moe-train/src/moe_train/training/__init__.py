"""One step, the loop around it, and the libraries put together for one rank.

May import: checkpoint, config, data, layout, model, optim, rank, report, tokenization, parallel,
slices, errors; comm_collectives, gpu_alloc, mesh_spmd, moe_pipeline, unified_ckpt.
"""

from moe_train.training.build import Training as Training
from moe_train.training.build import build_runner as build_runner
from moe_train.training.build import build_stages as build_stages
from moe_train.training.build import build_training as build_training
from moe_train.training.build import check_layout as check_layout
from moe_train.training.build import read_model_config as read_model_config
from moe_train.training.build import rules_of_job as rules_of_job
from moe_train.training.layout_request import LayoutRequests as LayoutRequests
from moe_train.training.loop import Reporter as Reporter
from moe_train.training.loop import TrainingLoop as TrainingLoop
from moe_train.training.sources import open_splits as open_splits
from moe_train.training.timeline import TIMELINE_FILE as TIMELINE_FILE
