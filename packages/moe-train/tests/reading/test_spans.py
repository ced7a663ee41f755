"""What stands for a file's content, so that token files made of it are found again."""

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np

from moe_train.reading.formats import DataFile
from moe_train.reading.spans import content_digest, cut_array

Make = Callable[[Path, str], DataFile]


def test_the_digest_of_an_array_is_that_of_its_bytes_and_of_its_index(
    tmp_path: Path, data_file: Make
) -> None:
    path, matrix = tmp_path / "a.bin", tmp_path / "a.npy"
    path.write_bytes(np.arange(4, dtype="<u2").tobytes())
    np.save(matrix, np.arange(4).reshape(2, 2))
    for file in (data_file(path, "bin"), data_file(matrix, "npy")):
        assert cut_array(file, "uint16", 0).digest == content_digest(file)
    digests = []
    for length in (1, 2):
        header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 2, 3)
        index = struct.pack("<iiqqqqq", length, 4 - length, 0, 2 * length, 0, 1, 2)
        path.with_suffix(".idx").write_bytes(header + index)
        digests.append(cut_array(data_file(path, "megatron"), "", 0).digest)
    assert digests[0] != digests[1]
