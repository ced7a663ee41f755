"""Bytes on their way: ranges copied between files, and a directory that appears complete.

A room of its own, since nothing here knows what the bytes mean.

May import: nothing but checks and errors.
"""

from weight_convert.staging.copying import OpenFiles as OpenFiles
from weight_convert.staging.copying import copy_bytes as copy_bytes
from weight_convert.staging.directory import fsync_path as fsync_path
from weight_convert.staging.directory import refuse_existing as refuse_existing
from weight_convert.staging.directory import staged_directory as staged_directory
