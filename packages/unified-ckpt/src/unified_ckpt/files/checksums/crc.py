"""CRC-32 as zlib defines it, from the fastest library at hand.

zlib-ng computes the same numbers several times faster than most builds of zlib, by carry-less
multiplication, and lets other threads of Python run meanwhile. It is a dependency of this package;
where it cannot be installed zlib takes its place, so that checkpoints are readable everywhere.

    crc = crc32(second, crc32(first))
"""

try:
    from zlib_ng.zlib_ng import crc32
except ImportError:
    from zlib import crc32

__all__ = ["crc32"]
