"""The room `dcp`."""

from unified_ckpt.dcp.reader import UnifiedStorageReader as UnifiedStorageReader
from unified_ckpt.dcp.writer import UnifiedStorageWriter as UnifiedStorageWriter
