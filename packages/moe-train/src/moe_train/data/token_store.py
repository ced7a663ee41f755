"""Documents as token ids on disk: what preparing writes once and every rank maps.

A store is four files beside each other: `train.bin` (the ids, raw little-endian), `train.starts`
(where each document begins, int64, and the end of the last), `train.mask` (which tokens are
targets; only where some are not) and `train.json`, which says dtype, counts and checksums.

Invariant: the JSON is written last, after the others are on the disk. Files whose sizes do not fit
it are refused by `open_store`; bytes that changed since are found by `damage_of`.

    with new_store(Path("train.bin"), vocab_size=4096) as writer:
        writer.add(np.array([5, 6, 0, 7, 0]), np.array([0, 3]))     # two documents
    open_store(Path("train.bin")).starts                            # [0, 3, 5]
"""

import contextlib
import functools
import itertools
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_train.errors import TrainValueError

_FORMAT = 2
_BLOCK_BYTES = 1 << 26
_DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_STARTS, _MASK = ".starts", ".mask"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenStore:
    """The documents of one file, mapped and read only where touched.

    Attributes:
        tokens: ids, [N] of uint16 or uint32.
        starts: document i is `tokens[starts[i]:starts[i + 1]]`, end token included; int64 [D + 1].
        trained: 1 where the token is a target when it is predicted, uint8 [N]; None: all are.
    """

    tokens: NDArray[Any]
    starts: NDArray[np.int64]
    trained: NDArray[np.uint8] | None

    @property
    def num_documents(self) -> int:
        """How many documents there are."""
        return len(self.starts) - 1


class _CheckedFile:
    """A file that is written from front to back, and the checksum of each of its blocks."""

    def __init__(self, path: Path) -> None:
        self._stream = path.open("wb")
        self._room = _BLOCK_BYTES
        self.checksums = [0]

    def write(self, data: bytes) -> None:
        self._stream.write(data)
        view = memoryview(data)
        while view:
            part, view = view[: self._room], view[self._room :]
            self.checksums[-1] = zlib.crc32(part, self.checksums[-1])
            self._room -= len(part)
            if not self._room:
                self._room = _BLOCK_BYTES
                self.checksums.append(0)

    def close(self, sync: bool) -> None:
        if sync:
            self._stream.flush()
            os.fsync(self._stream.fileno())
        self._stream.close()


class StoreWriter:
    """Writes a store from front to back; made by `new_store`."""

    def __init__(self, path: Path, vocab_size: int, with_mask: bool) -> None:
        self._path = path
        self._dtype_name = "uint16" if vocab_size <= 1 << 16 else "uint32"
        self._files = {".bin": _CheckedFile(path), _STARTS: _CheckedFile(path.with_suffix(_STARTS))}
        if with_mask:
            self._files[_MASK] = _CheckedFile(path.with_suffix(_MASK))
        self.num_tokens = 0
        self.num_documents = 0

    def add(
        self,
        tokens: NDArray[Any],
        begins: NDArray[np.int64],
        trained: NDArray[Any] | None = None,
    ) -> None:
        """Append tokens; documents begin at `begins` among them.

        Args:
            tokens: ids below the vocabulary size, [N]; those before the first of `begins` go on
                with the document before.
            begins: int64 [D], ascending.
            trained: [N], true where a token is a target; None: everywhere. Kept by a store with a
                mask only.
        """
        self._files[".bin"].write(tokens.astype(_DTYPES[self._dtype_name]).tobytes())
        self._files[_STARTS].write((begins + self.num_tokens).astype("<i8").tobytes())
        if _MASK in self._files:
            mask = np.ones(len(tokens), np.uint8) if trained is None else trained
            self._files[_MASK].write(mask.astype(np.uint8).tobytes())
        self.num_tokens += len(tokens)
        self.num_documents += len(begins)

    def finish(self) -> None:
        """Put everything on the disk, the description last."""
        self._files[_STARTS].write(np.array([self.num_tokens], "<i8").tobytes())
        self.close(sync=True)
        facts = {
            "format": _FORMAT,
            "dtype": self._dtype_name,
            "num_tokens": self.num_tokens,
            "num_documents": self.num_documents,
            "checksums": {suffix: file.checksums for suffix, file in self._files.items()},
        }
        with self._path.with_suffix(".json").open("w", encoding="utf-8") as stream:
            stream.write(json.dumps(facts) + "\n")
            stream.flush()
            os.fsync(stream.fileno())

    def close(self, *, sync: bool = False) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close(sync)


@contextlib.contextmanager
def new_store(path: Path, *, vocab_size: int, with_mask: bool = False) -> Iterator[StoreWriter]:
    """Write a new store; it can be opened when the block has ended without an error."""
    writer = StoreWriter(path, vocab_size, with_mask)
    try:
        yield writer
        writer.finish()
    finally:
        writer.close()


def write_store(
    path: Path,
    documents: Iterable[NDArray[Any]],
    *,
    vocab_size: int,
    trained: Iterable[NDArray[Any]] | None = None,
) -> None:
    """Write a whole store.

    Args:
        documents: the ids of each, end token included.
        trained: for each document which tokens are targets; None: no mask is written.
    """
    with new_store(path, vocab_size=vocab_size, with_mask=trained is not None) as writer:
        masks = itertools.repeat(None) if trained is None else trained
        for ids, mask in zip(documents, masks, strict=False):
            writer.add(ids, np.zeros(1, np.int64), mask)


def open_store(path: Path) -> TokenStore:
    """Open a store for reading; `path` is its .bin file.

    Raises:
        ValueError: the description is missing or unreadable, or a file's size does not fit it.
    """
    facts = _facts(path)
    num_tokens, num_documents = facts["num_tokens"], facts["num_documents"]
    mask = _MASK in facts["checksums"]
    return TokenStore(
        tokens=_mapped(path, _DTYPES[facts["dtype"]], num_tokens),
        starts=_mapped(path.with_suffix(_STARTS), np.dtype("<i8"), num_documents + 1),
        trained=_mapped(path.with_suffix(_MASK), np.dtype("u1"), num_tokens) if mask else None,
    )


def damage_of(path: Path) -> str:
    """What is wrong with the files of a store, each read whole; "" when nothing is."""
    try:
        checksums = _facts(path)["checksums"]
        open_store(path)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for suffix, expected in checksums.items():
                file = path.with_suffix(suffix)
                found = pool.map(functools.partial(_checksum, file), range(len(expected)))
                for index, (old, new) in enumerate(zip(expected, found, strict=True)):
                    if old != new:
                        first = index * _BLOCK_BYTES
                        return (
                            f"{file} is damaged: bytes {first} to {first + _BLOCK_BYTES} no longer "
                            f"have the checksum {old:08x} that they were written with"
                        )
    except TrainValueError as error:
        return str(error)
    except OSError as error:
        return f"{path} cannot be read: {error}"
    return ""


def _checksum(path: Path, index: int) -> int:
    with path.open("rb") as stream:
        stream.seek(index * _BLOCK_BYTES)
        return zlib.crc32(stream.read(_BLOCK_BYTES))


def _facts(path: Path) -> dict[str, Any]:
    facts_file = path.with_suffix(".json")
    try:
        facts: dict[str, Any] = json.loads(facts_file.read_bytes())
        fits = facts["format"] == _FORMAT and facts["dtype"] in _DTYPES
        sums = facts["checksums"]
        fits = fits and {".bin", _STARTS} <= sums.keys() <= {".bin", _STARTS, _MASK}
        int(facts["num_tokens"]), int(facts["num_documents"])
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise TrainValueError(
            f"{path} cannot be opened as a token file: {type(error).__name__}: {error}"
        ) from error
    if not fits:
        raise TrainValueError(f"{facts_file} describes no token file of format {_FORMAT}")
    return facts


def _mapped(path: Path, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    try:
        size_bytes = path.stat().st_size
    except OSError as error:
        raise TrainValueError(f"{path} cannot be opened as a token file: {error}") from error
    if size_bytes != count * dtype.itemsize:
        raise TrainValueError(
            f"{path} has {size_bytes} bytes, but its description has {count} entries of "
            f"{dtype.itemsize} bytes; delete its folder, it is made again"
        )
    if count == 0:
        return np.empty(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r", shape=(count,))
