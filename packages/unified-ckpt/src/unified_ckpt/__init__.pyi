from unified_ckpt.background.async_saving import AsyncSaveResponse as AsyncSaveResponse
from unified_ckpt.background.async_saving import async_save as async_save
from unified_ckpt.background.config import AsyncSaverConfig as AsyncSaverConfig
from unified_ckpt.background.ema import EmaConfig as EmaConfig
from unified_ckpt.background.offload_plan import OffloadPlan as OffloadPlan
from unified_ckpt.background.offload_plan import plan_offload as plan_offload
from unified_ckpt.background.saver import AsyncSaver as AsyncSaver
from unified_ckpt.background.zero_cost import ZeroCostSaver as ZeroCostSaver
from unified_ckpt.dcp.reader import UnifiedStorageReader as UnifiedStorageReader
from unified_ckpt.dcp.writer import UnifiedStorageWriter as UnifiedStorageWriter
from unified_ckpt.errors import CheckpointError as CheckpointError
from unified_ckpt.errors import CorruptCheckpointError as CorruptCheckpointError
from unified_ckpt.errors import DamagedCheckpointWarning as DamagedCheckpointWarning
from unified_ckpt.errors import LoadError as LoadError
from unified_ckpt.errors import SaveArgumentError as SaveArgumentError
from unified_ckpt.errors import SaveError as SaveError
from unified_ckpt.errors import SavePeerError as SavePeerError
from unified_ckpt.geometry.flat import flat_buffer_ranges as flat_buffer_ranges
from unified_ckpt.geometry.layouts.layouts import LocalBox as LocalBox
from unified_ckpt.geometry.layouts.layouts import ParallelDegrees as ParallelDegrees
from unified_ckpt.geometry.layouts.layouts import ParameterRule as ParameterRule
from unified_ckpt.geometry.layouts.layouts import expert_shards as expert_shards
from unified_ckpt.geometry.layouts.layouts import global_expert_keys as global_expert_keys
from unified_ckpt.geometry.layouts.layouts import rank_box as rank_box
from unified_ckpt.geometry.shard import BoxMeta as BoxMeta
from unified_ckpt.geometry.shard import Shard as Shard
from unified_ckpt.loading.collective_load import LoadReport as LoadReport
from unified_ckpt.loading.collective_load import load as load
from unified_ckpt.options import LoadOptions as LoadOptions
from unified_ckpt.options import SaveOptions as SaveOptions
from unified_ckpt.plans.checkpoint.directory import load_files as load_files
from unified_ckpt.plans.checkpoint.directory import read_index as read_index
from unified_ckpt.plans.load_plan import SplitTensor as SplitTensor
from unified_ckpt.plans.load_plan import StoredTensor as StoredTensor
from unified_ckpt.plans.load_plan import plan_load as plan_load
from unified_ckpt.plans.save_plan import SavePlan as SavePlan
from unified_ckpt.plans.save_plan import plan_save as plan_save
from unified_ckpt.run.folder import find_fault as find_fault
from unified_ckpt.run.folder import get_last_checkpoint as get_last_checkpoint
from unified_ckpt.run.folder import rotate as rotate
from unified_ckpt.run.folder import valid_checkpoints as valid_checkpoints
from unified_ckpt.run.manager import CheckpointManager as CheckpointManager
from unified_ckpt.run.manager import Decision as Decision
from unified_ckpt.run.manager import ManagerOptions as ManagerOptions
from unified_ckpt.run.tiers import copy_checkpoint as copy_checkpoint
from unified_ckpt.run.tiers import flush_tier as flush_tier
from unified_ckpt.run.tiers import last_checkpoint_of_tiers as last_checkpoint_of_tiers
from unified_ckpt.run.verify import Problem as Problem
from unified_ckpt.run.verify import VerifyReport as VerifyReport
from unified_ckpt.run.verify import verify_checkpoint as verify_checkpoint
from unified_ckpt.saving.collective_save import SaveReport as SaveReport
from unified_ckpt.saving.collective_save import save as save
from unified_ckpt.state.nested import Stateful as Stateful
from unified_ckpt.state.nested import find_tied_keys as find_tied_keys
from unified_ckpt.state.random_state import random_state_files as random_state_files
from unified_ckpt.state.random_state import restore_random_state as restore_random_state
from unified_ckpt.tools.diff import Difference as Difference
from unified_ckpt.tools.diff import diff_checkpoints as diff_checkpoints
from unified_ckpt.tools.rewrite import export_model as export_model
from unified_ckpt.tools.rewrite import reshard as reshard

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
