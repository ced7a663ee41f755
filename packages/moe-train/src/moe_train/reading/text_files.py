"""Text from a file: UTF-8, without loss; CRLF and a byte order mark stay, and it is said.

Invariant: a long file is read in parts that meet at ends of lines. Where a part begins is a
function of the file and of the place alone, so that parts read by different processes fit together.

    cut = line_border(path, 1 << 20)
    read_part(path, 0, cut) + read_part(path, cut, size) == read_part(path, 0, size)
"""

import os
from pathlib import Path

from moe_train.errors import TrainValueError

BOM = b"\xef\xbb\xbf"
"""The byte order mark of UTF-8, which some programs write at the beginning of a file."""

_SEARCH_BYTES = 1 << 20
_SNIFF_BYTES = 1 << 16


def line_border(path: Path, place: int) -> int:
    """The first place at or behind `place` at which a line begins.

    In a line of more than a mebibyte it is the first place at which a character begins, so that
    memory stays bounded. At most the file's size.
    """
    if place <= 0:
        return 0
    with path.open("rb") as stream:
        stream.seek(place - 1)
        window = stream.read(_SEARCH_BYTES)
    found = window.find(b"\n")
    if found >= 0:
        return place + found
    if len(window) < _SEARCH_BYTES:
        return place - 1 + len(window)
    inside = next(index for index in range(1, 5) if window[index] & 0xC0 != 0x80)
    return place - 1 + inside


def row_border(path: Path, place: int) -> int:
    """The first place at or behind `place` at which a line begins, however long lines are."""
    if place <= 0:
        return 0
    with path.open("rb") as stream:
        stream.seek(place - 1)
        stream.readline()
        return stream.tell()


def read_bytes(path: Path, start: int, stop: int) -> bytes:
    """The bytes of a part."""
    with path.open("rb") as stream:
        stream.seek(start)
        return stream.read(stop - start)


def as_text(data: bytes) -> str | None:
    """The bytes as text; None if they are not UTF-8 or hold NUL characters."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text


def read_part(path: Path, start: int, stop: int) -> str:
    """The text of a part that begins and ends at borders.

    Raises:
        ValueError: it is not UTF-8 text.
    """
    text = as_text(read_bytes(path, start, stop))
    if text is None:
        raise TrainValueError(
            f"{path} is not UTF-8 text between bytes {start} and {stop}; convert it (iconv -t "
            "UTF-8), or leave it out of the corpus"
        )
    return text


def looks_binary(path: Path) -> bool:
    """Whether the file's beginning is no UTF-8 text."""
    with path.open("rb") as stream:
        head = stream.read(_SNIFF_BYTES)
    whole = os.path.getsize(path) <= len(head)
    # A character may be cut at the end of what was read.
    return as_text(head) is None and (
        whole or all(as_text(head[:-cut]) is None for cut in (1, 2, 3))
    )
