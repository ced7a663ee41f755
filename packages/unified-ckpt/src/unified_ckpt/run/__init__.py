"""The room `run`."""

from unified_ckpt.run.manager import CheckpointManager as CheckpointManager
from unified_ckpt.run.manager import Decision as Decision
from unified_ckpt.run.manager import ManagerOptions as ManagerOptions
