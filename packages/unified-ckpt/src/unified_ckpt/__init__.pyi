from unified_ckpt.async_saving import AsyncSaveResponse as AsyncSaveResponse
from unified_ckpt.async_saving import async_save as async_save
from unified_ckpt.checkpoint import load_files as load_files
from unified_ckpt.checkpoint import read_index as read_index
from unified_ckpt.dcp_reader import UnifiedStorageReader as UnifiedStorageReader
from unified_ckpt.dcp_writer import UnifiedStorageWriter as UnifiedStorageWriter
from unified_ckpt.diff import Difference as Difference
from unified_ckpt.diff import diff_checkpoints as diff_checkpoints
from unified_ckpt.ema import EmaConfig as EmaConfig
from unified_ckpt.errors import CheckpointError as CheckpointError
from unified_ckpt.errors import CorruptCheckpointError as CorruptCheckpointError
from unified_ckpt.errors import DamagedCheckpointWarning as DamagedCheckpointWarning
from unified_ckpt.errors import LoadError as LoadError
from unified_ckpt.errors import SaveArgumentError as SaveArgumentError
from unified_ckpt.errors import SaveError as SaveError
from unified_ckpt.errors import SavePeerError as SavePeerError
from unified_ckpt.flat import flat_buffer_ranges as flat_buffer_ranges
from unified_ckpt.folder import find_fault as find_fault
from unified_ckpt.folder import get_last_checkpoint as get_last_checkpoint
from unified_ckpt.folder import rotate as rotate
from unified_ckpt.folder import valid_checkpoints as valid_checkpoints
from unified_ckpt.layouts import LocalBox as LocalBox
from unified_ckpt.layouts import ParallelDegrees as ParallelDegrees
from unified_ckpt.layouts import ParameterRule as ParameterRule
from unified_ckpt.layouts import expert_shards as expert_shards
from unified_ckpt.layouts import global_expert_keys as global_expert_keys
from unified_ckpt.layouts import rank_box as rank_box
from unified_ckpt.load_plan import SplitTensor as SplitTensor
from unified_ckpt.load_plan import StoredTensor as StoredTensor
from unified_ckpt.load_plan import plan_load as plan_load
from unified_ckpt.loading import LoadReport as LoadReport
from unified_ckpt.loading import load as load
from unified_ckpt.manager import CheckpointManager as CheckpointManager
from unified_ckpt.manager import Decision as Decision
from unified_ckpt.manager import ManagerOptions as ManagerOptions
from unified_ckpt.offload_plan import OffloadPlan as OffloadPlan
from unified_ckpt.offload_plan import plan_offload as plan_offload
from unified_ckpt.options import LoadOptions as LoadOptions
from unified_ckpt.options import SaveOptions as SaveOptions
from unified_ckpt.random_state import random_state_files as random_state_files
from unified_ckpt.random_state import restore_random_state as restore_random_state
from unified_ckpt.rewrite import export_model as export_model
from unified_ckpt.rewrite import reshard as reshard
from unified_ckpt.save_plan import SavePlan as SavePlan
from unified_ckpt.save_plan import plan_save as plan_save
from unified_ckpt.saver import AsyncSaver as AsyncSaver
from unified_ckpt.saver_config import AsyncSaverConfig as AsyncSaverConfig
from unified_ckpt.saving import SaveReport as SaveReport
from unified_ckpt.saving import save as save
from unified_ckpt.shard import BoxMeta as BoxMeta
from unified_ckpt.shard import Shard as Shard
from unified_ckpt.state import Stateful as Stateful
from unified_ckpt.state import find_tied_keys as find_tied_keys
from unified_ckpt.tiers import copy_checkpoint as copy_checkpoint
from unified_ckpt.tiers import flush_tier as flush_tier
from unified_ckpt.tiers import last_checkpoint_of_tiers as last_checkpoint_of_tiers
from unified_ckpt.verify import Problem as Problem
from unified_ckpt.verify import VerifyReport as VerifyReport
from unified_ckpt.verify import verify_checkpoint as verify_checkpoint
from unified_ckpt.zero_cost import ZeroCostSaver as ZeroCostSaver

__all__ = [
    "AsyncSaveResponse",
    "AsyncSaver",
    "AsyncSaverConfig",
    "BoxMeta",
    "CheckpointError",
    "CheckpointManager",
    "CorruptCheckpointError",
    "DamagedCheckpointWarning",
    "Decision",
    "Difference",
    "EmaConfig",
    "LoadError",
    "LoadOptions",
    "LoadReport",
    "LocalBox",
    "ManagerOptions",
    "OffloadPlan",
    "ParallelDegrees",
    "ParameterRule",
    "Problem",
    "SaveArgumentError",
    "SaveError",
    "SaveOptions",
    "SavePeerError",
    "SavePlan",
    "SaveReport",
    "Shard",
    "SplitTensor",
    "Stateful",
    "StoredTensor",
    "UnifiedStorageReader",
    "UnifiedStorageWriter",
    "VerifyReport",
    "ZeroCostSaver",
    "async_save",
    "copy_checkpoint",
    "diff_checkpoints",
    "expert_shards",
    "export_model",
    "find_fault",
    "find_tied_keys",
    "flat_buffer_ranges",
    "flush_tier",
    "get_last_checkpoint",
    "global_expert_keys",
    "last_checkpoint_of_tiers",
    "load",
    "load_files",
    "plan_load",
    "plan_offload",
    "plan_save",
    "random_state_files",
    "rank_box",
    "read_index",
    "reshard",
    "restore_random_state",
    "rotate",
    "save",
    "valid_checkpoints",
    "verify_checkpoint",
]
