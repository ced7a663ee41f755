"""The files of a tokenizer in the cache, on the disk when they have their names.

write_files(folder, tokenizer.files)
kept_tokenizer(tokenizer, cache_dir, made=folder)   # where exactly its files are
"""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from moe_train.cache import locked, publish
from moe_train.errors import MissingFileError
from moe_train.reading import digest_of
from moe_train.tokenization import TextTokenizer, read_files

_TOKENIZER = "tokenizer.json"


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files into a folder."""
    for name, content in files.items():
        with (folder / name).open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())


def file_digest(path: Path) -> str:
    """Hex digits that stand for the content of a file; of a missing one those of an empty one."""
    return _digest(path.read_bytes() if path.is_file() else b"")


def kept_tokenizer(tokenizer: TextTokenizer, cache_dir: Path, made: Path) -> Path:
    """The tokenizer.json of a folder of the cache with exactly this tokenizer's files.

    Args:
        made: a folder with a tokenizer that gives the same ids, whose other files may differ.
    """
    if _files_in(made) == tokenizer.files:
        return made / _TOKENIZER
    files = tokenizer.files
    name = digest_of([text for file in sorted(files) for text in (file, _digest(files[file]))])
    folder = cache_dir / "tokenizers" / name
    with locked(cache_dir / "locks" / f"{name}.lock"):
        if _files_in(folder) != files:
            publish(
                folder,
                lambda work: write_files(work, files),
                is_made=lambda: _files_in(folder) == files,
            )
    return folder / _TOKENIZER


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _files_in(folder: Path) -> dict[str, bytes]:
    try:
        return read_files(folder)
    except MissingFileError:
        return {}
