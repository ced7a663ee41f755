"""Where a checkpoint lies that is no local directory: whole objects by key, and nothing more.

Local folders, object stores and fsspec's file systems behind one protocol.

May import: files.
"""

from unified_ckpt.files.storage.fsspec_store import FsspecStore as FsspecStore
from unified_ckpt.files.storage.local import LocalStore as LocalStore
from unified_ckpt.files.storage.location import Location as Location
from unified_ckpt.files.storage.location import as_target as as_target
from unified_ckpt.files.storage.location import shown as shown
from unified_ckpt.files.storage.protocol import Fetched as Fetched
from unified_ckpt.files.storage.protocol import ObjectStore as ObjectStore
from unified_ckpt.files.storage.protocol import StagedBuffers as StagedBuffers
from unified_ckpt.files.storage.retrying import Retrying as Retrying
from unified_ckpt.files.storage.stored_file import PARTS_AT_ONCE as PARTS_AT_ONCE
from unified_ckpt.files.storage.stored_file import READ_BYTES as READ_BYTES
from unified_ckpt.files.storage.stored_file import StoredFile as StoredFile
