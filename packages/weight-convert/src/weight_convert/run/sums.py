"""Checksums that a file holds of its own bytes, put in when all of it is written.

put_sums(fd, target)
"""

import os
import zlib

from weight_convert.outputs import TargetFile

_SUM_BYTES = 1 << 20


def put_sums(fd: int, target: TargetFile) -> None:
    """Write every checksum to its places; putting them again does nothing."""
    for one in target.sums:
        value = 0
        for begin in range(one.begin, one.end, _SUM_BYTES):
            value = zlib.crc32(os.pread(fd, min(_SUM_BYTES, one.end - begin), begin), value)
        for place in one.places:
            os.pwrite(fd, value.to_bytes(4, "little"), place)
