from unified_ckpt.checkpoint import load_files as load_files
from unified_ckpt.checkpoint import read_index as read_index
from unified_ckpt.errors import CheckpointError as CheckpointError
from unified_ckpt.errors import CorruptCheckpointError as CorruptCheckpointError
from unified_ckpt.errors import LoadError as LoadError
from unified_ckpt.errors import SaveArgumentError as SaveArgumentError
from unified_ckpt.errors import SaveError as SaveError
from unified_ckpt.errors import SavePeerError as SavePeerError
from unified_ckpt.folder import get_last_checkpoint as get_last_checkpoint
from unified_ckpt.folder import rotate as rotate
from unified_ckpt.load_plan import StoredTensor as StoredTensor
from unified_ckpt.load_plan import plan_load as plan_load
from unified_ckpt.loading import LoadReport as LoadReport
from unified_ckpt.loading import load as load
from unified_ckpt.save_plan import SavePlan as SavePlan
from unified_ckpt.save_plan import plan_save as plan_save
from unified_ckpt.saving import SaveReport as SaveReport
from unified_ckpt.saving import save as save
from unified_ckpt.shard import BoxMeta as BoxMeta
from unified_ckpt.shard import Shard as Shard
from unified_ckpt.verify import verify_checkpoint as verify_checkpoint

__all__ = [
    "BoxMeta",
    "CheckpointError",
    "CorruptCheckpointError",
    "LoadError",
    "LoadReport",
    "SaveArgumentError",
    "SaveError",
    "SavePeerError",
    "SavePlan",
    "SaveReport",
    "Shard",
    "StoredTensor",
    "get_last_checkpoint",
    "load",
    "load_files",
    "plan_load",
    "plan_save",
    "read_index",
    "rotate",
    "save",
    "verify_checkpoint",
]
