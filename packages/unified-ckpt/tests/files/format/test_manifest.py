import json
import random
import zlib
from pathlib import Path

import pytest

from unified_ckpt.errors import CorruptCheckpointError
from unified_ckpt.files import OpenFolder
from unified_ckpt.files.format.manifest import (
    FileRecord,
    Manifest,
    decode_manifest,
    encode_manifest,
    read_manifest,
)
from unified_ckpt.geometry.regions import Region

MANIFEST = Manifest(
    files={
        "model.safetensors": FileRecord.of(
            100, ((Region(0, 60), 2**32 - 1), (Region(60, 4, (5, 2), (8, 4)), 0))
        ),
        "é.json": FileRecord.of(0, ()),
    }
)


def test_a_manifest_is_json_and_comes_back_as_it_was() -> None:
    raw = encode_manifest(MANIFEST)
    assert decode_manifest(raw, Path("m")) == MANIFEST
    assert json.loads(raw)["files"]["model.safetensors"]["bytes"] == 100


def test_every_flipped_bit_of_a_manifest_is_found() -> None:
    raw = encode_manifest(MANIFEST)
    for bit in range(8 * len(raw)):
        bad = bytearray(raw)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptCheckpointError, match="manifest"):
            decode_manifest(bytes(bad), Path("m"))
    with pytest.raises(CorruptCheckpointError):
        decode_manifest(raw[: random.randrange(len(raw))], Path("m"))


@pytest.mark.parametrize(
    "table",
    [
        {"format": "other", "version": 2, "files": {}},
        {"format": "unified-ckpt", "version": 1, "files": {}},
        {"format": "unified-ckpt", "version": 2},
        {
            "format": "unified-ckpt",
            "version": 2,
            "files": {"x": {"bytes": 1, "runs": [[0, [-1], "00000003"]], "strided": []}},
        },
        {"format": "unified-ckpt", "version": 2, "files": {"x": {"bytes": 1, "runs": [3]}}},
        {"format": "unified-ckpt", "version": 2, "files": []},
        *(
            {"format": "unified-ckpt", "version": 2, "files": {name: entry}}
            for name, entry in {
                "../x": {"bytes": 0, "runs": [], "strided": []},
                "/x": {"bytes": 0, "runs": [], "strided": []},
                "y" * 300: {"bytes": 0, "runs": [], "strided": []},
                "too long": {"bytes": 3, "runs": [[0, [4], "00000003"]], "strided": []},
                "overlap": {"bytes": 8, "runs": [[0, [4], "00000003"], [3, [4], "00000003"]]},
                "endless": {"bytes": 8, "runs": [], "strided": [[0, 0, [10**18], [0], 1]]},
                "twice": {
                    "bytes": 4,
                    "runs": [[0, [4], "00000003"]],
                    "strided": [[0, 1, [2], [2], 1]],
                },
                "odd sums": {"bytes": 4, "runs": [[0, [4], "000003"]], "strided": []},
                "fewer sums": {"bytes": 4, "runs": [[0, [2, 2], "00000003"]], "strided": []},
            }.items()
        ),
    ],
)
def test_a_manifest_of_another_kind_is_refused(table: dict) -> None:
    body = json.dumps(table, separators=(",", ":")).encode()[:-1]
    with pytest.raises(CorruptCheckpointError, match="malformed manifest"):
        decode_manifest(body + b',"crc32":"%08x"}\n' % zlib.crc32(body), Path("m"))


def test_no_manifest_is_none(tmp_path: Path) -> None:
    assert read_manifest(OpenFolder(tmp_path)) is None
