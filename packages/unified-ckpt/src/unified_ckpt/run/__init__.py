"""When a training run saves, and where it resumes.

May import: signals, tiers, loading, folders, saving, state, plans, files.
"""

from unified_ckpt.errors import CorruptCheckpointError as CorruptCheckpointError
from unified_ckpt.errors import DamagedCheckpointWarning as DamagedCheckpointWarning
from unified_ckpt.errors import LoadError as LoadError
from unified_ckpt.errors import ReplacedCheckpointError as ReplacedCheckpointError
from unified_ckpt.errors import SaveError as SaveError
from unified_ckpt.errors import SavePeerError as SavePeerError
from unified_ckpt.errors import StoreError as StoreError
from unified_ckpt.run.manager import CheckpointManager as CheckpointManager
from unified_ckpt.run.manager import Decision as Decision
from unified_ckpt.run.manager_options import ManagerOptions as ManagerOptions
from unified_ckpt.run.metrics import encode_metrics as encode_metrics
from unified_ckpt.run.nearest import resume_nearest as resume_nearest
