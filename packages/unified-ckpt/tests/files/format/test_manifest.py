import json
import random
import zlib
from pathlib import Path

import pytest

from unified_ckpt.errors import CorruptCheckpointError
from unified_ckpt.files import OpenFolder
from unified_ckpt.files.format.manifest import (
    INLINE_BYTES,
    MANIFEST_NAME,
    Manifest,
    check_sizes,
    decode_manifest,
    encode_manifest,
    read_manifest,
)
from unified_ckpt.files.format.tables import TABLES_NAME, FileRecord, pack_record
from unified_ckpt.geometry.regions import Region

RECORDS = {
    "model.safetensors": FileRecord.of(
        100, ((Region(0, 60), 2**32 - 1), (Region(60, 4, (5, 2), (8, 4)), 0))
    ),
    "é.json": FileRecord.of(0, ()),
}
PACKED = {name: pack_record(record) for name, record in RECORDS.items()}


def many_records() -> dict[str, FileRecord]:
    """More than a manifest holds in itself; pieces of other lengths cannot be joined."""
    rng = random.Random(0)
    lengths = [rng.randint(1, 9) for _ in range(INLINE_BYTES // 20)]
    begins = [sum(lengths[:i]) for i in range(len(lengths))]
    pieces = [(Region(b, n), rng.randrange(2**32)) for b, n in zip(begins, lengths, strict=True)]
    return {**RECORDS, "model-00001-of-00002.safetensors": FileRecord.of(sum(lengths), pieces)}


def write_in_parts(folder: Path) -> dict[str, FileRecord]:
    records = many_records()
    packed = {name: pack_record(record) for name, record in records.items()}
    keys = {"model": {f"w{i:05d}": "model.safetensors" for i in range(5000)}}
    for name, raw in encode_manifest(packed, lambda: keys, data="").items():
        (folder / name).write_bytes(raw)
    return records


def test_a_manifest_is_json_and_comes_back_as_it_was(tmp_path: Path) -> None:
    blobs = encode_manifest(PACKED, lambda: {})
    assert list(blobs) == [MANIFEST_NAME]
    raw = blobs[MANIFEST_NAME]
    with OpenFolder(tmp_path) as folder:
        assert decode_manifest(raw, folder) == Manifest(files=RECORDS)
    assert json.loads(raw)["files"]["model.safetensors"]["bytes"] == 100


def test_a_large_manifest_is_read_in_parts(tmp_path: Path) -> None:
    records = write_in_parts(tmp_path)
    with OpenFolder(tmp_path) as folder:
        manifest = read_manifest(folder)
        assert manifest is not None
        assert set(manifest.files) == {*records, TABLES_NAME}
        assert {name: manifest.files[name] for name in records} == records
        assert manifest.sizes["model.safetensors"] == 100
        table = (tmp_path / TABLES_NAME).read_bytes()
        own = manifest.files[TABLES_NAME]
        assert own.num_bytes == own.covered_bytes == len(table) == manifest.sizes[TABLES_NAME]
        assert all(zlib.crc32(table[r.start : r.end]) == crc for r, crc in own.pieces())
        keys = manifest.keys["model"]
        assert keys.find("w00000") == keys.find("w04999") == "model.safetensors"
        assert keys.find("w") is keys.find("w05000") is keys.find("w00000a") is None
        assert keys.starting("w0204") == [f"w0204{i}" for i in range(10)]  # over two blocks
        assert len(keys.all()) == 5000 == len(keys.starting("w")) and keys.starting("x") == []
        missing = [f"{name}: file is missing" for name in records]
        assert sorted(check_sizes(folder, manifest)) == sorted(missing)


def test_every_flipped_bit_of_a_manifest_is_found(tmp_path: Path) -> None:
    raw = encode_manifest(PACKED, lambda: {})[MANIFEST_NAME]
    with OpenFolder(tmp_path) as folder:
        for bit in range(8 * len(raw)):
            bad = bytearray(raw)
            bad[bit // 8] ^= 1 << bit % 8
            with pytest.raises(CorruptCheckpointError, match="manifest"):
                decode_manifest(bytes(bad), folder)
        with pytest.raises(CorruptCheckpointError):
            decode_manifest(raw[: random.randrange(len(raw))], folder)


def test_every_flipped_byte_of_the_tables_is_found_and_named_by_who_reads_it(
    tmp_path: Path,
) -> None:
    records = write_in_parts(tmp_path)
    path = tmp_path / TABLES_NAME
    good = path.read_bytes()

    def read_all() -> None:
        with OpenFolder(tmp_path) as folder:
            manifest = read_manifest(folder)
            assert manifest is not None
            for name in records:
                manifest.files[name]
            manifest.keys["model"].all()

    read_all()
    for place in random.sample(range(len(good)), 200):
        path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        with pytest.raises(
            CorruptCheckpointError, match=r"manifest.bin: the (record|keys) .*differ"
        ):
            read_all()
    path.write_bytes(good[:-1])
    with pytest.raises(CorruptCheckpointError, match=f"has {len(good) - 1} bytes, expected"):
        read_all()
    path.unlink()
    with pytest.raises(CorruptCheckpointError, match=r"manifest.bin: is missing"):
        read_all()


def test_mutated_manifests_in_parts_are_refused_or_read(tmp_path: Path) -> None:
    write_in_parts(tmp_path)
    path = tmp_path / MANIFEST_NAME
    good = path.read_bytes().rpartition(b',"crc32":"')[0]
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    for _ in range(300):
        place = rng.randrange(len(good))
        digits = str(rng.choice([0, -1, 7, 2**31, 10**30, 1.5])).encode()
        body = good[:place] + digits + good[place + rng.randint(0, 3) :]
        path.write_bytes(body + b',"crc32":"%08x"}\n' % zlib.crc32(body))
        try:
            with OpenFolder(tmp_path) as folder:
                manifest = read_manifest(folder)
                assert manifest is not None, seed
                [*manifest.files.values()]
                [keys.all() for keys in manifest.keys.values()]
        except CorruptCheckpointError:
            continue


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
def test_a_manifest_of_another_kind_is_refused(table: dict, tmp_path: Path) -> None:
    body = json.dumps(table, separators=(",", ":")).encode()[:-1]
    raw = body + b',"crc32":"%08x"}\n' % zlib.crc32(body)
    with (
        OpenFolder(tmp_path) as folder,
        pytest.raises(CorruptCheckpointError, match="malformed manifest"),
    ):
        decode_manifest(raw, folder)


def test_no_manifest_is_none(tmp_path: Path) -> None:
    assert read_manifest(OpenFolder(tmp_path)) is None
