"""torch's distributed checkpoint reads and writes our files.

May import: loading, saving, state, plans, format.tables, geometry.
"""

from unified_ckpt.dcp.reader import UnifiedStorageReader as UnifiedStorageReader
from unified_ckpt.dcp.writer import UnifiedStorageWriter as UnifiedStorageWriter
