"""Where the bytes of a save go: files of a local folder, or objects below a location.

A local file may have several writers, each at its own byte ranges; an object has one, which writes
it from its first byte to its last.

    sink_of(Path("run/.checkpoint-10.tmp")).write("a.json", [(0, b"{}")], num_bytes=2)
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from unified_ckpt.errors import SaveError
from unified_ckpt.files import (
    BATCH_BYTES,
    Buffer,
    begin_writeback,
    make_folders,
    open_for_write,
    sync_file,
    write_at,
)
from unified_ckpt.files.storage import Location, StagedBuffers


class Sink(Protocol):
    """A place that takes the files of one save."""

    @property
    def in_chunks(self) -> bool:
        """Whether it sends bytes as they come: chunks, each summed just before, suit it best."""

    def write(self, name: str, runs: Iterable[tuple[int, Buffer]], *, num_bytes: int) -> None:
        """Write what this rank has of a file, durably: (first byte, bytes) pairs in that order."""


def sink_of(folder: Path | Location, *, is_staged: bool = True) -> Sink:
    """Return the sink for a folder or a location.

    Args:
        is_staged: whether buffers take memory as long as they are held.
    """
    if isinstance(folder, Location):
        return _LocationSink(folder, is_staged)
    return _FolderSink(folder)


@dataclass(frozen=True, slots=True)
class _FolderSink:
    """Positioned writes; neighbouring ones go to the kernel in one call."""

    folder: Path
    in_chunks: bool = False

    def write(self, name: str, runs: Iterable[tuple[int, Buffer]], *, num_bytes: int) -> None:
        path = self.folder / name
        if "/" in name:
            make_folders(path.parent)
        with open_for_write(path) as fd:
            batch = _Batch(fd)
            for start, buffer in runs:
                batch.add(start, buffer)
            batch.flush()
            sync_file(fd)


@dataclass(frozen=True, slots=True)
class _LocationSink:
    """One upload a file; a store that keeps fewer bytes than it took is found out at once."""

    location: Location
    is_staged: bool
    in_chunks: bool = True

    def write(self, name: str, runs: Iterable[tuple[int, Buffer]], *, num_bytes: int) -> None:
        where = self.location / name
        buffers = _in_order(runs)
        given = StagedBuffers(buffers) if self.is_staged else buffers
        where.store.upload(where.key, given, num_bytes=num_bytes)
        size = where.store.size(where.key)
        if size != num_bytes:
            raise SaveError(f"{where}: {num_bytes} bytes were written, but the store has {size}")


def _in_order(runs: Iterable[tuple[int, Buffer]]) -> Iterator[Buffer]:
    position = 0
    for start, buffer in runs:
        if start != position:
            raise SaveError(f"byte {start} comes after byte {position}, where objects have no gaps")
        position += len(buffer)
        yield buffer


class _Batch:
    """Collects buffers that follow each other in a file, so that one call writes them."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._start = 0
        self._num_bytes = 0
        self._buffers: list[Buffer] = []

    def add(self, start: int, buffer: Buffer) -> None:
        """Take a buffer for byte `start`, after writing what it does not continue."""
        if start != self._start + self._num_bytes or self._num_bytes >= BATCH_BYTES:
            self.flush()
            self._start = start
        self._buffers.append(buffer)
        self._num_bytes += len(buffer)

    def flush(self) -> None:
        """Write what was collected, and let the disk begin with it."""
        write_at(self._fd, self._buffers, self._start)
        begin_writeback(self._fd, self._start, self._num_bytes)
        self._start += self._num_bytes
        self._num_bytes = 0
        self._buffers = []
