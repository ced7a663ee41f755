"""How a file of a corpus is written, told by its ending, and compressed files made plain.

A compressed file has no places to begin at, so it is unpacked once into a folder of the cache
before it is cut into pieces, and removed when the corpus is ready.

    file_format("a/b.jsonl.gz", kind="chat", given="auto")      # "jsonl"
    unpack(Path("b.jsonl.gz"), Path("cache/unpacked"))          # the same content, plain
"""

import bz2
import gzip
import hashlib
import lzma
import os
import shutil
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from moe_train.errors import TrainValueError

_ENDINGS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".bin": "bin",
    ".npy": "npy",
    ".safetensors": "safetensors",
}
_READ_AS_TEXT = ("bin", "npy", "safetensors")  # what these endings mean in a corpus of text
_READERS: dict[str, Callable[[str], Any]] = {
    ".gz": gzip.GzipFile,
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
    ".zst": lambda path: pa.input_stream(path, compression="zstd"),
}
_COPY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """One file to read.

    Attributes:
        name: stands for the file on every machine; hold-out and fingerprint depend on it.
        path: where its plain content is.
        shown: its path in messages.
        format: "text", "jsonl", "parquet", "megatron", "bin", "npy" or "safetensors".
        size_bytes: of its plain content.
    """

    name: str
    path: Path
    shown: str
    format: str
    size_bytes: int


def compression_of(name: str) -> str:
    """The ending of a compressed file, or ""."""
    ending = os.path.splitext(name)[1].lower()
    return ending if ending in _READERS else ""


def endings_of(kind: str) -> tuple[str, ...]:
    """The endings of files that may hold this kind, compressed ones too."""
    plain = [end for end, name in _ENDINGS.items() if kind == "tokens" or name not in _READ_AS_TEXT]
    return tuple(end + packed for end in plain for packed in ("", *_READERS))


def file_format(path: Path, *, kind: str, given: str) -> str:
    """The format of a file.

    Args:
        given: that of the configuration; "auto" goes by the ending.

    Raises:
        ValueError: the ending says nothing.
    """
    if given != "auto":
        return given
    name = path.name.removesuffix(compression_of(path.name))
    ending = os.path.splitext(name)[1].lower()
    found = _ENDINGS.get(ending, "")
    if kind == "text":
        return found if found in ("jsonl", "parquet") and ending != ".json" else "text"
    if found == "bin" and path.with_suffix(".idx").is_file():
        found = "megatron"
    if not found or (kind != "tokens" and found not in ("jsonl", "parquet")):
        raise TrainValueError(
            f'{path} has no ending that says how {kind} is written; rename it, or set "format" of '
            "the source (jsonl, parquet" + (", bin, npy ...)" if kind == "tokens" else ")")
        )
    return found


def unpack(path: Path, folder: Path) -> Path:
    """The plain content of a compressed file, below `folder`; made once, complete when it is there.

    Raises:
        ValueError: the file is truncated or damaged.
    """
    status = path.stat()
    known_as = f"{path}|{status.st_size}|{status.st_mtime_ns}".encode("utf-8", "surrogateescape")
    target = folder / hashlib.blake2b(known_as, digest_size=16).hexdigest()
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f"{target.name}.*"):  # by a process that was killed
        left.unlink(missing_ok=True)
    work = target.with_suffix(f".{os.getpid()}")
    try:
        with _READERS[compression_of(path.name)](str(path)) as source, work.open("wb") as copy:
            shutil.copyfileobj(source, copy, _COPY_BYTES)
            copy.flush()
            os.fsync(copy.fileno())
    except (EOFError, OSError, zlib.error, lzma.LZMAError, pa.ArrowException) as error:
        work.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the disk, not of the content
        raise TrainValueError(
            f"{path} cannot be unpacked: {error}; it is cut off or damaged, copy it again"
        ) from error
    work.replace(target)
    return target
