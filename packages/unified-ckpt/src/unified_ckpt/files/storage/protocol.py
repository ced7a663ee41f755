"""What a place for checkpoints must be able to do; every object store can, and so can files.

Objects are written whole: nobody ever reads a part of one. Only `swap` depends on what is there,
so that of two saves that commit at once one fails. Nothing is assumed of listings, which may be
old (what is asked for by its key is as it is), and no object is written by two processes.

    store.upload("run/checkpoint-10/data-1/model.safetensors", buffers, num_bytes=100)
    store.swap("run/checkpoint-10/manifest.json", manifest, old=None)
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from unified_ckpt.files import Buffer

# Of an upload, the least that S3 takes. What is uploaded from plain memory is sent from there.
PART_BYTES = 5 * 1024 * 1024
# Of what some stores write beside an object before they swap it. What is left of it by a process
# that was killed goes with the files of saves, whose names begin alike.
SWAP_PREFIX = "data-swap-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """A small object as it was at one moment; versions of different contents differ."""

    data: bytes
    version: str


@dataclass(frozen=True, slots=True)
class StagedBuffers:
    """Buffers that take memory as long as they are held; of others stores may hold more at once."""

    buffers: Iterable[Buffer]

    def __iter__(self) -> Iterator[Buffer]:
        return iter(self.buffers)


class ObjectStore(Protocol):
    """Objects by key (names joined by `/`).

    Every method raises an OSError where it fails: a ConnectionError or TimeoutError where trying
    again may help (what was asked for may have been done all the same), a FileNotFoundError where
    there is no such object, a PermissionError where it may not. Messages hold no credentials.
    """

    @property
    def url(self) -> str:
        """The place in messages, without credentials: `s3://bucket`."""

    def upload(self, key: str, buffers: Iterable[Buffer], *, num_bytes: int) -> None:
        """Write an object, durable and visible as a whole when this returns, and not before."""

    def swap(self, key: str, data: bytes, *, old: str | None) -> bool:
        """Write a small object if its version is `old` (None: if there is none), in one step.

        Returns:
            False if it has another version, and nothing was written.
        """

    def fetch(self, key: str) -> Fetched | None:
        """Return a small object, None if there is none."""

    def read(self, key: str, start: int, num_bytes: int) -> Buffer:
        """Return bytes of an object from `start`, fewer only at its end."""

    def size(self, key: str) -> int | None:
        """Return the bytes of an object, None if there is none."""

    def keys(self, prefix: str) -> Sequence[str]:
        """List the keys below `prefix/`; the list may be old."""

    def children(self, prefix: str) -> Sequence[str]:
        """List the names directly below `prefix/`; the list may be old."""

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; those that are gone already are no error."""


def part_bytes_for(num_bytes: int, *, most_parts: int = 10_000) -> int:
    """Return the bytes of a part of an upload; stores take at most 10,000 of them."""
    return max(PART_BYTES, -(-num_bytes // most_parts))
