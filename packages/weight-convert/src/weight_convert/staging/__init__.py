"""Bytes on their way: ranges copied and noted, and a directory that appears complete.

A room of its own, since nothing here knows what the bytes mean.

May import: nothing but checks and errors.
"""

from weight_convert.staging.copying import OpenFiles as OpenFiles
from weight_convert.staging.copying import Pipe as Pipe
from weight_convert.staging.copying import free_range as free_range
from weight_convert.staging.copying import same_bytes as same_bytes
from weight_convert.staging.copying import write_all as write_all
from weight_convert.staging.directory import fsync_path as fsync_path
from weight_convert.staging.directory import hidden_sibling as hidden_sibling
from weight_convert.staging.directory import refuse_existing as refuse_existing
from weight_convert.staging.directory import staged_directory as staged_directory
from weight_convert.staging.journal import Journal as Journal
from weight_convert.staging.journal import checksum as checksum
from weight_convert.staging.journal import read_journal as read_journal
