"""The tables of a manifest: what is known of each file, and where each key is stored.

Those of a large checkpoint are read one at a time.

May import: files, checksums, geometry.
"""

from unified_ckpt.files.format.tables.in_parts import TABLES_NAME as TABLES_NAME
from unified_ckpt.files.format.tables.in_parts import ListedKeys as ListedKeys
from unified_ckpt.files.format.tables.in_parts import StoredKeys as StoredKeys
from unified_ckpt.files.format.tables.in_parts import encode_tables as encode_tables
from unified_ckpt.files.format.tables.in_parts import open_tables as open_tables
from unified_ckpt.files.format.tables.records import FileRecord as FileRecord
from unified_ckpt.files.format.tables.records import decode_records as decode_records
from unified_ckpt.files.format.tables.records import encode_records as encode_records
from unified_ckpt.files.format.tables.records import join_records as join_records
from unified_ckpt.files.format.tables.records import pack_record as pack_record
from unified_ckpt.files.format.tables.records import packed_size as packed_size
from unified_ckpt.files.format.tables.records import unpack_record as unpack_record
