"""CRC-32 of buffers and files, beside reading and writing.

May import: files, geometry.
"""

from unified_ckpt.files.checksums.checksums import CHUNK_BYTES as CHUNK_BYTES
from unified_ckpt.files.checksums.checksums import Checksums as Checksums
from unified_ckpt.files.checksums.checksums import PendingSum as PendingSum
from unified_ckpt.files.checksums.checksums import chunk_lengths as chunk_lengths
from unified_ckpt.files.checksums.checksums import crc_of_chunks as crc_of_chunks
from unified_ckpt.files.checksums.checksums import crc_of_file as crc_of_file
from unified_ckpt.files.checksums.checksums import crc_of_runs as crc_of_runs
from unified_ckpt.files.checksums.crc import crc32 as crc32
