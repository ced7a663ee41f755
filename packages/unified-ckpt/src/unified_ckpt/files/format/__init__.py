"""Safetensors headers and the manifest: bytes on disk to records and back.

May import: files, checksums, geometry.
"""

from unified_ckpt.files.format.header import HeaderEntry as HeaderEntry
from unified_ckpt.files.format.header import encode_header as encode_header
from unified_ckpt.files.format.header import read_header as read_header
from unified_ckpt.files.format.manifest import MANIFEST_NAME as MANIFEST_NAME
from unified_ckpt.files.format.manifest import Manifest as Manifest
from unified_ckpt.files.format.manifest import check_name as check_name
from unified_ckpt.files.format.manifest import check_sizes as check_sizes
from unified_ckpt.files.format.manifest import encode_manifest as encode_manifest
from unified_ckpt.files.format.manifest import read_manifest as read_manifest
from unified_ckpt.files.format.tables import FileRecord as FileRecord
from unified_ckpt.files.format.tombstone import is_tombstone as is_tombstone
from unified_ckpt.files.format.tombstone import make_tombstone as make_tombstone
