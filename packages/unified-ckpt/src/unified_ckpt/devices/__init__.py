"""Bytes between devices and host memory: pinned, on streams of their own, never one by one.

May import: geometry.
"""

from unified_ckpt.devices.copy_stream import ALIGNMENT_BYTES as ALIGNMENT_BYTES
from unified_ckpt.devices.copy_stream import CopyStream as CopyStream
from unified_ckpt.devices.copy_stream import Placed as Placed
from unified_ckpt.devices.copy_stream import as_bytes as as_bytes
from unified_ckpt.devices.copy_stream import is_plain_device_memory as is_plain_device_memory
from unified_ckpt.devices.fetching import Fetcher as Fetcher
from unified_ckpt.devices.pinning import pin as pin
from unified_ckpt.devices.pinning import unpin as unpin
from unified_ckpt.devices.sending import Sender as Sender
