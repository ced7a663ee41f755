"""The room `run`."""

from unified_ckpt.run.folder import check_steps_free as check_steps_free
from unified_ckpt.run.folder import find_fault as find_fault
from unified_ckpt.run.folder import get_last_checkpoint as get_last_checkpoint
from unified_ckpt.run.folder import numbered_checkpoints as numbered_checkpoints
from unified_ckpt.run.folder import rotate as rotate
from unified_ckpt.run.folder import step_of as step_of
from unified_ckpt.run.folder import valid_checkpoints as valid_checkpoints
from unified_ckpt.run.manager import CheckpointManager as CheckpointManager
from unified_ckpt.run.manager import Decision as Decision
from unified_ckpt.run.manager import ManagerOptions as ManagerOptions
from unified_ckpt.run.signals import SignalWatch as SignalWatch
from unified_ckpt.run.tiers import copy_checkpoint as copy_checkpoint
from unified_ckpt.run.tiers import flush_tier as flush_tier
from unified_ckpt.run.tiers import last_checkpoint_of_tiers as last_checkpoint_of_tiers
from unified_ckpt.run.verify import Problem as Problem
from unified_ckpt.run.verify import VerifyReport as VerifyReport
from unified_ckpt.run.verify import verify_checkpoint as verify_checkpoint
