"""A corpus cut into pieces of some megabytes, each of which any process can read by itself.

Invariant: the cut is a function of the files' contents alone. Each part of each file is in one
piece, in the order of the files, so that the pieces put together are the corpus, however many
processes read them and in whatever order.

    spans, seen = cut_file(file, split_at=None, end_id=0, dtype="uint16")
    group_spans(spans)          # tuples of spans, one for each piece
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_train.reading.arrays import TokenArray, open_array
from moe_train.reading.formats import DataFile
from moe_train.reading.rows import open_parquet
from moe_train.reading.text_files import line_border, read_bytes, row_border

PIECE_BYTES = 1 << 23
TRAIN, VALIDATION, BY_ROW = "train", "validation", ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A part of a file.

    Attributes:
        start: first byte (text, JSONL), row (Parquet) or token (arrays).
        stop: behind the last one.
        first_row: number of the first row or document that begins in it.
        part: the split that all of it belongs to; BY_ROW: each row by its hash.
        begins: text: a document begins here.
        ends: text: the document ends here.
        size_bytes: about how much there is to read.
    """

    file: DataFile
    start: int
    stop: int
    first_row: int = 0
    part: str = BY_ROW
    begins: bool = True
    ends: bool = True
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FileCut:
    """A file's spans, how many rows or documents it has, and a digest of its content."""

    spans: tuple[Span, ...]
    num_rows: int
    digest: str


def cut_rows(file: DataFile) -> FileCut:
    """Cut a JSONL file at ends of lines, or a Parquet file between rows; reads it once."""
    if file.format == "parquet":
        reader = open_parquet(file)
        num_rows = reader.metadata.num_rows
        groups = range(reader.num_row_groups)
        plain = sum(reader.metadata.row_group(group).total_byte_size for group in groups)
        step = max(1, num_rows * PIECE_BYTES // max(1, plain))
        spans = []
        for start in range(0, num_rows, step):
            stop = min(start + step, num_rows)
            size = plain * (stop - start) // num_rows
            spans.append(Span(file=file, start=start, stop=stop, first_row=start, size_bytes=size))
        return FileCut(spans=tuple(spans), num_rows=num_rows, digest=content_digest(file))
    state = hashlib.blake2b(digest_size=16)
    first_row, spans = 0, []
    for start, stop in _borders(file, row_border):
        data = read_bytes(file.path, start, stop)
        state.update(data)
        spans.append(
            Span(file=file, start=start, stop=stop, first_row=first_row, size_bytes=stop - start)
        )
        first_row += int(np.count_nonzero(np.frombuffer(data, np.uint8) == 10))
        first_row += stop == file.size_bytes and not data.endswith(b"\n")
    return FileCut(spans=tuple(spans), num_rows=first_row, digest=state.hexdigest())


def cut_text(file: DataFile, part: str, split_at: int | None = None) -> list[Span]:
    """Cut one document of text at ends of lines.

    Args:
        part: the split that it belongs to.
        split_at: a place from which on it is held out, as a document of its own.
    """
    documents = [(0, file.size_bytes, part)]
    if split_at is not None:
        documents = [(0, split_at, TRAIN), (split_at, file.size_bytes, VALIDATION)]
    spans = []
    for first, last, own in documents:
        for start, stop in _borders(file, line_border, first, last):
            span = Span(
                file=file,
                start=start,
                stop=stop,
                part=own,
                begins=start == first,
                ends=stop == last,
                size_bytes=stop - start,
            )
            spans.append(span)
    return spans


def cut_array(file: DataFile, dtype: str, end_id: int) -> FileCut:
    """Cut an array of tokens anywhere; reads it once."""
    array = open_array(file, dtype)
    step = PIECE_BYTES // array.ids.dtype.itemsize
    spans, documents = [], 0
    for start in range(0, len(array.ids), step):
        stop = min(start + step, len(array.ids))
        begins = document_begins(array, start, stop, end_id)
        size = (stop - start) * array.ids.dtype.itemsize
        span = Span(file=file, start=start, stop=stop, first_row=documents, size_bytes=size)
        spans.append(span)
        documents += len(begins)
    digest = content_digest(file)
    if file.format == "megatron" and array.borders is not None:  # they lie in another file
        digest += hashlib.blake2b(array.borders.tobytes(), digest_size=16).hexdigest()
    return FileCut(spans=tuple(spans), num_rows=documents, digest=digest)


def document_begins(array: TokenArray, start: int, stop: int, end_id: int) -> NDArray[np.int64]:
    """The places in [start, stop) at which documents begin, counted from `start`."""
    if array.borders is not None:
        low, high = np.searchsorted(array.borders[:-1], [start, stop])
        return np.asarray(array.borders[low:high] - start, dtype=np.int64)
    # A document begins at 0 and behind each end token.
    begins = np.flatnonzero(array.ids[max(0, start - 1) : stop - 1] == end_id).astype(np.int64)
    return begins if start else np.concatenate([np.zeros(1, np.int64), begins + 1])


def group_spans(spans: Iterable[Span]) -> Iterator[tuple[Span, ...]]:
    """Consecutive spans put together until a piece has its size."""
    group: list[Span] = []
    size = 0
    for span in spans:
        group.append(span)
        size += span.size_bytes
        if size >= PIECE_BYTES // 2:
            yield tuple(group)
            group, size = [], 0
    if group:
        yield tuple(group)


def row_hashes(name: str, first_row: int, count: int) -> NDArray[np.uint64]:
    """Evenly spread numbers, one for each row of a file; the same on every machine."""
    key = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    mixed = np.arange(first_row, first_row + count, dtype=np.uint64)
    mixed = mixed * np.uint64(0x9E3779B97F4A7C15) + np.uint64(int.from_bytes(key, "little"))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))


def content_digest(file: DataFile) -> str:
    """Hex digits that stand for a file's bytes."""
    with file.path.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _borders(
    file: DataFile, border: Callable[[Path, int], int], first: int = 0, last: int | None = None
) -> Iterator[tuple[int, int]]:
    stop_at = file.size_bytes if last is None else last
    start = first
    while start < stop_at:
        place = start + PIECE_BYTES
        stop = min(border(file.path, place), stop_at) if place < stop_at else stop_at
        yield start, stop
        start = stop
