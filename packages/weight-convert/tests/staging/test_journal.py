import os
import zlib
from pathlib import Path

import pytest

from weight_convert.errors import WeightConvertError
from weight_convert.staging import Journal, checksum, read_journal


def test_notes_are_read_again_and_a_torn_line_is_none(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with Journal.open(path, {"identity": "a"}, resume=False) as journal:
        journal.note(0, 7)
        journal.note(3, 0xFFFFFFFF)
        journal.note(5, None)
    with path.open("ab") as file:
        file.write(b"4 0000")
    with Journal.open(path, {"identity": "a"}, resume=True) as journal:
        assert journal.noted == {0: 7, 3: 0xFFFFFFFF, 5: None}
    with pytest.raises(WeightConvertError, match="is of another job"):
        Journal.open(path, {"identity": "b"}, resume=True)
    with Journal.open(path, {"identity": "b"}, resume=False) as journal:
        assert journal.noted == {}


@pytest.mark.parametrize(
    "lost", [b"\0" * 9, b"2 0000\0\0\0\0", b"2", b"\xff 00000001", b"2 +0000001"]
)
def test_notes_behind_bytes_that_were_lost_with_the_power_count_as_none(
    tmp_path: Path, lost: bytes
) -> None:
    path = tmp_path / "journal"
    path.write_bytes(b'{"identity": "a"}\n1 00000007\n' + lost + b"\n3 00000009\n")
    assert read_journal(path) == ({"identity": "a"}, {1: 7})


@pytest.mark.parametrize(
    "first", [b"", b"\0" * 8 + b"\n", b"\xff\n", b"{", b"{\n1 00000001\n", b'{"identity": "a"}']
)
def test_a_journal_that_was_hardly_begun_is_none(tmp_path: Path, first: bytes) -> None:
    path = tmp_path / "journal"
    path.write_bytes(first)
    assert read_journal(path) == (None, {})
    assert read_journal(tmp_path / "absent") == (None, {})


def test_a_checksum_is_of_the_range_or_none(tmp_path: Path) -> None:
    content = os.urandom(3_000_000)
    path = tmp_path / "file"
    path.write_bytes(content)
    fd = os.open(path, os.O_RDONLY)
    try:
        assert checksum(fd, 5, 2_500_000) == zlib.crc32(content[5:2_500_000])
        assert checksum(fd, 7, 7) == 0
        assert checksum(fd, 2_900_000, 3_000_001) is None
    finally:
        os.close(fd)
