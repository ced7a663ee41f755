"""What a run has written so far, piece by piece, so that a killed run can go on.

The first line says of which job the journal is; every further one names a piece, with its CRC-32
where nothing is left that it could be held against. Nothing here trusts what a file looks like: a
piece counts as written when its bytes are those of its source, or have the checksum that was noted,
so neither a file cut short nor one that lost bytes with the power passes. Comparing only where a
run is resumed spares every other run from reading what it wrote.

    with Journal.open(path, {"job": "..."}, resume=True) as journal:
        17 in journal.noted         # whether a former run wrote piece 17
        journal.note(17, None)      # as its source

Invariant: a line is written after the bytes that it speaks of; a torn line is no line, and what
follows it counts as not written.
"""

import json
import os
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from weight_convert.errors import WeightConvertError

_BUFFER_BYTES = 128 << 10
_NOTE = re.compile(rb"(\d{1,18}) (-|[0-9a-f]{8})")


class Journal:
    """An open journal; a context."""

    def __init__(self, path: Path, job: Mapping[str, Any], noted: Mapping[int, int | None]) -> None:
        self.path = path
        self.job = job
        self.noted = noted
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)

    def __enter__(self) -> "Journal":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self._fd)

    @classmethod
    def open(cls, path: Path, job: Mapping[str, Any], *, resume: bool) -> "Journal":
        """Open the journal of a job, or begin it.

        Args:
            path: its file.
            job: what tells this job from others, as JSON; `job["identity"]` is compared.
            resume: whether to go on with what stands there.

        Raises:
            WeightConvertError: `resume`, and the journal is of another job.
        """
        former, noted = read_journal(path) if resume else (None, {})
        if former is None:
            path.write_bytes(json.dumps(job).encode() + b"\n")
        elif former.get("identity") != job["identity"]:
            raise WeightConvertError(
                f"what an earlier run left ({path}) is of another job: the source, the format or "
                f"an option has changed; begin anew without resuming, or undo the change"
            )
        return cls(path, job, noted)

    def note(self, piece: int, checksum: int | None) -> None:
        """Note that a piece is written; without a checksum, its source stays and is compared."""
        os.write(self._fd, b"%d %s\n" % (piece, b"-" if checksum is None else b"%08x" % checksum))

    def flush(self) -> None:
        """Make all notes durable."""
        os.fsync(self._fd)


def read_journal(path: Path) -> tuple[Mapping[str, Any] | None, dict[int, int | None]]:
    """The job and the checksums noted in a journal; None and nothing if there is none."""
    if not path.exists():
        return None, {}
    first, *lines = path.read_bytes().split(b"\n")[:-1] or [b""]  # the last one is torn, or empty
    try:
        job = json.loads(first)
    except ValueError:
        return None, {}
    noted: dict[int, int | None] = {}
    for line in lines:
        match = _NOTE.fullmatch(line)
        if match is None:  # lost with the power: zeros stand there, and what follows is unsure
            break
        noted[int(match[1])] = None if match[2] == b"-" else int(match[2], 16)
    return job, noted


def checksum(fd: int, begin: int, end: int) -> int | None:
    """The CRC-32 of a range of an open file; None where the file is shorter."""
    buffer = bytearray(min(_BUFFER_BYTES, max(end - begin, 1)))
    view = memoryview(buffer)
    value = 0
    while begin < end:
        count = os.preadv(fd, [view[: min(len(buffer), end - begin)]], begin)
        if count == 0:
            return None
        value = zlib.crc32(view[:count], value)
        begin += count
    return value
