import random
import runpy
import sys
import zlib

import pytest

from unified_ckpt.files.checksums import crc
from unified_ckpt.files.checksums.crc import crc32


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_sums_are_those_of_zlib(kind):
    draw = random.Random(0)
    for size in (0, 1, 7, 63, 64, 65, 5119, 5121, 1 << 20, (1 << 20) + 3):
        data = kind(draw.randbytes(size))
        assert crc32(data) == zlib.crc32(data)
        start = draw.getrandbits(32)
        assert crc32(data, start) == zlib.crc32(data, start)
        assert crc32(data[size // 3 :], crc32(data[: size // 3])) == zlib.crc32(data)


def test_zlib_takes_the_place_of_a_missing_library(monkeypatch):
    assert crc32 is not zlib.crc32
    monkeypatch.setitem(sys.modules, "zlib_ng.zlib_ng", None)
    assert runpy.run_path(crc.__file__)["crc32"] is zlib.crc32
