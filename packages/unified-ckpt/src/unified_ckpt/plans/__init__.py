"""Who writes and who reads which bytes of which file: pure data, alike on every rank.

May import: files, geometry.
"""

from unified_ckpt.plans.file_plan import FilePlan as FilePlan
from unified_ckpt.plans.file_plan import Piece as Piece
from unified_ckpt.plans.file_plan import split_key as split_key
from unified_ckpt.plans.load_plan import LoadPlan as LoadPlan
from unified_ckpt.plans.load_plan import Read as Read
from unified_ckpt.plans.load_plan import SplitTensor as SplitTensor
from unified_ckpt.plans.load_plan import StoredTensor as StoredTensor
from unified_ckpt.plans.load_plan import plan_load as plan_load
from unified_ckpt.plans.save_plan import DEFAULT_CHUNK_BYTES as DEFAULT_CHUNK_BYTES
from unified_ckpt.plans.save_plan import DEFAULT_MAX_SHARD_BYTES as DEFAULT_MAX_SHARD_BYTES
from unified_ckpt.plans.save_plan import SavePlan as SavePlan
from unified_ckpt.plans.save_plan import plan_save as plan_save
