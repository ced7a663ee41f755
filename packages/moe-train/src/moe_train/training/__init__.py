"""The room `training`."""

from moe_train.training.balancing import check_balancing as check_balancing
from moe_train.training.build import build_runner as build_runner
from moe_train.training.build import build_training as build_training
from moe_train.training.build import read_model_config as read_model_config
from moe_train.training.build import training_schedule as training_schedule
from moe_train.training.loop import Position as Position
from moe_train.training.loop import Reporter as Reporter
from moe_train.training.loop import TrainingLoop as TrainingLoop
from moe_train.training.recorder import AllocationRecorder as AllocationRecorder
from moe_train.training.sources import open_splits as open_splits
