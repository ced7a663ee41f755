import json
from pathlib import Path

import pytest

from unified_ckpt.errors import CorruptCheckpointError
from unified_ckpt.files import OpenFolder
from unified_ckpt.files.checksums import crc32
from unified_ckpt.files.format.tables import TABLES_NAME, StoredKeys, encode_tables, open_tables

_RECORD = b"\0" * 32


def _keys_of(folder: Path, file_of: dict[str, str]) -> StoredKeys:
    raw, said = encode_tables({name: _RECORD for name in ("a", "b")}, {"model": file_of})
    (folder / TABLES_NAME).write_bytes(raw)
    return open_tables(said, OpenFolder(folder))[2]["model"]


def test_keys_of_many_blocks_are_found_whatever_was_asked_before(tmp_path: Path) -> None:
    file_of = {f"key-{number:05d}": "ab"[number % 2] for number in range(5000)}
    for order in (1, -1):
        keys = _keys_of(tmp_path, file_of)
        asked = sorted([*file_of, "a", "key-02048x", "key-9", "zz"])[::order]
        assert {key: keys.find(key) for key in asked} == {key: file_of.get(key) for key in asked}
        assert keys.starting("key-0204") == [f"key-0204{number}" for number in range(10)]
        assert keys.all() == file_of


@pytest.mark.parametrize("wrong", ["key-00000x", "key-02049"])
def test_a_block_with_keys_of_another_one_is_refused(tmp_path: Path, wrong: str) -> None:
    raw, said = encode_tables(
        {"a": _RECORD}, {"model": {f"key-{number:05d}": "a" for number in range(3000)}}
    )
    first, begin, length, _ = said["keys"]["model"][0]
    keys, files = json.loads(raw[begin : begin + length])
    place = 0 if wrong < keys[1] else -1
    keys[place] = wrong
    block = json.dumps([keys, files], separators=(",", ":")).encode()
    said["keys"]["model"][0] = [first, len(raw), len(block), crc32(block)]
    said["tables"] = len(raw) + len(block)
    (tmp_path / TABLES_NAME).write_bytes(raw + block)
    stored = open_tables(said, OpenFolder(tmp_path))[2]["model"]
    with pytest.raises(CorruptCheckpointError, match="another block"):
        stored.find("key-00005")
