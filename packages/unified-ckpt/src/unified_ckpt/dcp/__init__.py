"""torch's distributed checkpoint reads and writes our files, and is converted from and to.

May import: loading, saving, state, plans, files, geometry.
"""

from unified_ckpt.dcp.converting import Converted as Converted
from unified_ckpt.dcp.converting import from_dcp as from_dcp
from unified_ckpt.dcp.converting import to_dcp as to_dcp
from unified_ckpt.dcp.reader import UnifiedStorageReader as UnifiedStorageReader
from unified_ckpt.dcp.writer import UnifiedStorageWriter as UnifiedStorageWriter
