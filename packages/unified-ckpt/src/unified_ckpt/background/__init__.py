"""The trainer's side of saves beside training: queue, copies, saver process.

May import: saver_process, tiers, snapshots, loading, saving, state, plans, files/storage,
devices, geometry.
"""

from unified_ckpt.background.async_saving import AsyncSaveResponse as AsyncSaveResponse
from unified_ckpt.background.async_saving import async_save as async_save
from unified_ckpt.background.config import AsyncSaverConfig as AsyncSaverConfig
from unified_ckpt.background.offload_plan import OffloadPlan as OffloadPlan
from unified_ckpt.background.offload_plan import plan_offload as plan_offload
from unified_ckpt.background.saver import AsyncSaver as AsyncSaver
from unified_ckpt.background.zero_cost import ZeroCostSaver as ZeroCostSaver
