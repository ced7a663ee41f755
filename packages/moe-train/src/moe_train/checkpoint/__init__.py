"""What a training checkpoint holds beside weights, and how it is saved, found and resumed.

May import: tokenization, config, data, layout, model, optim, errors; unified_ckpt.
"""

from moe_train.checkpoint.background import BackgroundSaves as BackgroundSaves
from moe_train.checkpoint.export import checkpoint_files as checkpoint_files
from moe_train.checkpoint.finding import find_checkpoint as find_checkpoint
from moe_train.checkpoint.finding import newest_checkpoint as newest_checkpoint
from moe_train.checkpoint.node_states import NodeStates as NodeStates
from moe_train.checkpoint.own_files import own_job as own_job
from moe_train.checkpoint.own_files import small_files as small_files
from moe_train.checkpoint.parts import has_part as has_part
from moe_train.checkpoint.samples import read_ledger as read_ledger
from moe_train.checkpoint.trainer_state import TrainerState as TrainerState
from moe_train.checkpoint.trainer_state import read_state as read_state
from moe_train.checkpoint.training_state import Checkpointer as Checkpointer
