"""A copy of the state on its way to the saver process, in memory that both map.

May import: saving, state, files/storage, devices, geometry.
"""

from unified_ckpt.snapshots.shared_memory import SharedMemory as SharedMemory
from unified_ckpt.snapshots.snapshot_request import SnapshotRequest as SnapshotRequest
from unified_ckpt.snapshots.snapshot_request import decode_request as decode_request
from unified_ckpt.snapshots.snapshot_request import encode_request as encode_request
from unified_ckpt.snapshots.staging import StagingBuffer as StagingBuffer
from unified_ckpt.snapshots.staging import StagingLayout as StagingLayout
from unified_ckpt.snapshots.staging import StagingPool as StagingPool
from unified_ckpt.snapshots.staging import tensors_of as tensors_of
