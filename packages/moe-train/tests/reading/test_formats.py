import bz2
import gzip
import lzma
from pathlib import Path

import pyarrow as pa
import pytest

from moe_train.reading.formats import compression_of, endings_of, file_format, unpack


@pytest.mark.parametrize(
    ("name", "kind", "format"),
    [
        ("a.py", "text", "text"),
        ("a.json", "text", "text"),
        ("a.bin", "text", "text"),
        ("a.txt.gz", "text", "text"),
        ("a.jsonl", "text", "jsonl"),
        ("a.NDJSON.zst", "text", "jsonl"),
        ("a.json", "chat", "jsonl"),
        ("a.parquet", "embedding", "parquet"),
        ("a.bin", "tokens", "bin"),
        ("a.npy.xz", "tokens", "npy"),
        ("a.safetensors", "tokens", "safetensors"),
    ],
)
def test_the_ending_says_the_format(tmp_path: Path, name: str, kind: str, format: str) -> None:
    assert file_format(tmp_path / name, kind=kind, given="auto") == format


def test_a_bin_file_with_an_index_is_megatrons(tmp_path: Path) -> None:
    (tmp_path / "a.idx").touch()
    assert file_format(tmp_path / "a.bin", kind="tokens", given="auto") == "megatron"
    assert file_format(tmp_path / "a.bin", kind="tokens", given="bin") == "bin"


@pytest.mark.parametrize(("name", "kind"), [("a.txt", "chat"), ("a.bin", "chat"), ("a", "tokens")])
def test_an_ending_that_says_nothing_is_refused(tmp_path: Path, name: str, kind: str) -> None:
    with pytest.raises(
        ValueError, match=f'has no ending that says how {kind} is written.*"format"'
    ):
        file_format(tmp_path / name, kind=kind, given="auto")


def test_endings_of_a_kind_have_compressed_forms() -> None:
    assert {".jsonl", ".jsonl.gz", ".parquet", ".json.zst"} <= set(endings_of("chat"))
    assert ".npy" not in endings_of("chat") and ".npy" in endings_of("tokens")
    assert (compression_of("a.txt.GZ"), compression_of("a.txt")) == (".gz", "")


def packed(path: Path, content: bytes) -> Path:
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(content))
    elif path.suffix == ".bz2":
        path.write_bytes(bz2.compress(content))
    elif path.suffix == ".xz":
        path.write_bytes(lzma.compress(content))
    else:
        with pa.CompressedOutputStream(str(path), "zstd") as stream:
            stream.write(content)
    return path


@pytest.mark.parametrize("ending", [".gz", ".bz2", ".xz", ".zst"])
def test_a_compressed_file_is_unpacked_once_and_a_cut_one_is_refused(
    tmp_path: Path, ending: str
) -> None:
    content = bytes(range(256)) * 5000
    path = packed(tmp_path / f"a.txt{ending}", content)
    plain = unpack(path, tmp_path / "plain")
    assert plain.read_bytes() == content
    stamp = plain.stat().st_mtime_ns
    assert unpack(path, tmp_path / "plain").stat().st_mtime_ns == stamp
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ValueError, match=f"a.txt{ending} cannot be unpacked: .*cut off or damaged"):
        unpack(path, tmp_path / "plain")
    assert len(list((tmp_path / "plain").iterdir())) == 1
    path.write_bytes(b"plain text")
    with pytest.raises(ValueError, match="cannot be unpacked"):
        unpack(path, tmp_path / "plain")
