"""Which part of which file of a source goes into which piece, and which is held out.

Held out are, near `validation_fraction` of the bytes or rows: whole documents of text; the last
lines of a text that is alone; rows, and documents in arrays of tokens, by a hash of file name and
number.

Invariant: the plan is a function of names and contents of the files and of the source's keys.

    plan = plan_source(source, find_files(source), fraction=0.02, end_id=0, unpacked=folder)
    make_piece(folder, 0, plan.pieces[0])
"""

import hashlib
import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from moe_train.config import SourceConfig
from moe_train.errors import TrainValueError
from moe_train.reading.arrays import ATTENTION, LABELS
from moe_train.reading.corpus import Document, find_documents, name_hash, sample_documents
from moe_train.reading.encode import EncodeJob, span_texts
from moe_train.reading.formats import DataFile, compression_of, endings_of, file_format, unpack
from moe_train.reading.spans import (
    PIECE_BYTES,
    TRAIN,
    VALIDATION,
    FileCut,
    Span,
    content_digest,
    cut_array,
    cut_rows,
    cut_text,
    group_spans,
    row_hashes,
)
from moe_train.reading.text_files import BOM, as_text, line_border, looks_binary, read_bytes

_ALL_ROWS = 1 << 64
_DEFAULT_EXTENSIONS = (".py",)  # of data.extensions; says nothing where rows are read
_FEW_HELD_ROWS = 50
_SCANNED_ROWS = 1 << 20
_LARGE_BYTES = 1_000_000_000
_NOT_TEXT = "files that are not UTF-8 text"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcePlan:
    """All that is to be done for a source.

    Attributes:
        pieces: what each piece reads.
        job: what is done with it.
        digests: names and contents of the files, and keys that shape the rows; what the
            fingerprint is made of.
        left_out: how many files are left out, by reason.
    """

    pieces: tuple[tuple[Span, ...], ...]
    job: EncodeJob
    digests: tuple[str, ...]
    left_out: dict[str, int]

    @property
    def size_bytes(self) -> int:
        """About how much there is to read."""
        return sum(span.size_bytes for piece in self.pieces for span in piece)


def find_files(source: SourceConfig) -> list[Document]:
    """The files of a source, as `find_documents` orders them.

    Raises:
        FileNotFoundError: an entry names nothing.
        ValueError: an entry has no file of the endings.
    """
    extensions, kind = source.extensions or ("*",), str(source.kind)
    is_text = kind == "text" and source.format in ("auto", "text")
    if not is_text and extensions == _DEFAULT_EXTENSIONS:
        extensions = endings_of(kind)
    place = "data" if source.name == "data" else source.place
    found = find_documents(source.corpus, extensions=extensions, place=place)
    found = [document for document in found if not document.name.endswith(".idx")]
    given, limit = str(source.format), source.max_bytes
    texts = [d for d in found if file_format(d.path, kind=kind, given=given) == "text"]
    if limit is None or not texts:
        return found
    # Beside files of rows, of which a part is used, texts have their share.
    share = sum(each.size_bytes for each in texts) / sum(each.size_bytes for each in found)
    kept = {each.path for each in sample_documents(texts, int(limit * share))}
    left = {each.path for each in texts} - kept
    return [document for document in found if document.path not in left]


def plan_source(
    source: SourceConfig,
    documents: Sequence[Document],
    *,
    fraction: float,
    end_id: int,
    unpacked: Path,
) -> SourcePlan:
    """Look into the files of a source, each once, and cut them into pieces.

    Args:
        source: with every key set.
        fraction: share to hold out; 0 holds nothing out.
        end_id: the token that ends documents in arrays.
        unpacked: folder for the content of compressed files, until the pieces are made.

    Raises:
        ValueError: a file cannot be used, or there is too little to hold a part of it out.
    """
    size_bytes = sum(document.size_bytes for document in documents)
    if size_bytes > _LARGE_BYTES:
        logger.info("looking through %d files, %.1f GB", len(documents), size_bytes / 1e9)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        files = list(pool.map(lambda each: _data_file(source, each, unpacked), documents))
        texts, left_out = _usable([file for file in files if file.format == "text"])
        others = [file for file in files if file.format != "text"]
        dtype = source.dtype or "uint16"
        cuts = list(pool.map(lambda file: _cut(file, dtype, end_id), others))
    digests = [part for file, digest in texts for part in (file.name, digest)]
    for file, cut in zip(others, cuts, strict=True):
        digests += [file.name, cut.digest]
    job = _job(source, cuts, fraction, dtype, sum(file.size_bytes for file, _ in texts))
    if others:
        digests.append(repr(job))
    if source.kind == "tokens":
        digests.append(f"{LABELS} {ATTENTION}")  # which were once not read: prepared anew
    if not texts and not any(cut.num_rows for cut in cuts):
        raise TrainValueError(_nothing_message(source, files))
    spans = _text_spans(source, [file for file, _ in texts], fraction, alone=not others)
    spans += _row_spans(source, cuts, fraction, alone=not texts)
    return SourcePlan(
        pieces=tuple(group_spans(spans)),
        job=job,
        digests=tuple(digests),
        left_out=left_out,
    )


def training_texts(plan: SourcePlan, max_bytes: int) -> Iterator[str]:
    """Texts of training documents, about `max_bytes` of them, in the order of hashes of names."""
    room = max_bytes
    spans = [span for piece in plan.pieces for span in piece]
    for span in sorted(spans, key=lambda span: (name_hash(span.file.name), span.file.name)):
        for text in span_texts(span, plan.job):
            if room <= 0:
                return
            yield text[:room]
            room -= len(text.encode())


def split_documents(
    documents: Sequence[DataFile], validation_fraction: float
) -> tuple[list[DataFile], list[DataFile]]:
    """Divide whole documents, at least two, into training and held-out ones.

    In the order of their names' hashes, documents that still fit are held out until the fraction
    is reached; so a new document seldom moves another one. Both parts keep the given order.
    """
    room = validation_fraction * sum(document.size_bytes for document in documents)
    held: set[Path] = set()
    for document in sorted(documents, key=lambda item: (name_hash(item.name), item.name)):
        if document.size_bytes <= room and len(held) < len(documents) - 1:
            room -= document.size_bytes
            held.add(document.path)
    if not held:
        held = {min(documents, key=lambda item: (item.size_bytes, item.name)).path}
    train = [document for document in documents if document.path not in held]
    return train, [document for document in documents if document.path in held]


def _data_file(source: SourceConfig, document: Document, unpacked: Path) -> DataFile:
    packed = compression_of(document.name)
    return DataFile(
        name=document.name,
        path=(path := unpack(document.path, unpacked) if packed else document.path),
        shown=str(document.path),
        format=file_format(document.path, kind=str(source.kind), given=str(source.format)),
        size_bytes=path.stat().st_size if packed else document.size_bytes,
    )


def _usable(files: Sequence[DataFile]) -> tuple[list[tuple[DataFile, str]], dict[str, int]]:
    """The files that are text, each with a digest of its content, and how many are not."""
    usable, wrong, num_crlf, num_marked = [], [], 0, 0
    for file in files:
        data = read_bytes(file.path, 0, min(file.size_bytes, PIECE_BYTES))
        if file.size_bytes > PIECE_BYTES:
            found = None if looks_binary(file.path) else f"cut {content_digest(file)}"
        else:
            text = as_text(data)
            found = digest_of([text]) if text else None
        if found is None:
            wrong.append(file.shown)
        else:
            usable.append((file, found))
            num_crlf += b"\r\n" in data
            num_marked += data.startswith(BOM)
    for count, what in ((num_crlf, "CRLF at ends of lines"), (num_marked, "a byte order mark")):
        if count:
            logger.info("%d files of text have %s, which stays in the text", count, what)
    if wrong:
        shown = ", ".join(wrong[:3]) + (", ..." if len(wrong) > 3 else "")
        logger.info("left out %d %s: %s", len(wrong), _NOT_TEXT, shown)
    return usable, {_NOT_TEXT: len(wrong)} if wrong else {}


def _cut(file: DataFile, dtype: str, end_id: int) -> FileCut:
    if file.format in ("jsonl", "parquet"):
        return cut_rows(file)
    return cut_array(file, dtype, end_id)


def _job(
    source: SourceConfig, cuts: Sequence[FileCut], fraction: float, dtype: str, text_bytes: int
) -> EncodeJob:
    spans = [span for cut in cuts for span in cut.spans]
    size = sum(span.size_bytes for span in spans)
    limit = source.max_bytes
    kept = 1.0 if limit is None or not size else max(0, limit - text_bytes) / size
    hold_below = int(fraction * _ALL_ROWS)
    keep_below = None if kept >= 1 else int(kept * _ALL_ROWS)
    num_rows = sum(cut.num_rows for cut in cuts)
    if fraction and cuts and num_rows * fraction * kept < _FEW_HELD_ROWS:
        hold_below = max(hold_below, _lowest_hash(cuts, keep_below) + 1)
    return EncodeJob(
        kind=str(source.kind),
        field=str(source.field),
        dtype=dtype,
        hold_below=min(hold_below, _ALL_ROWS - 1),
        keep_below=keep_below,
    )


def _lowest_hash(cuts: Sequence[FileCut], keep_below: int | None) -> int:
    """So that one row that is used is held out even where the fraction is less than that."""
    lowest = _ALL_ROWS - 1
    for cut in cuts:
        for first in range(0, cut.num_rows, _SCANNED_ROWS):
            count = min(_SCANNED_ROWS, cut.num_rows - first)
            hashes = row_hashes(name := cut.spans[0].file.name, first, count)
            if keep_below is not None:
                hashes = hashes[row_hashes(f"keep {name}", first, count) < keep_below]
            lowest = min(lowest, int(hashes.min(initial=lowest)))
    return lowest


def _text_spans(
    source: SourceConfig, files: Sequence[DataFile], fraction: float, alone: bool
) -> list[Span]:
    if not fraction:
        return [span for file in files for span in cut_text(file, TRAIN)]
    if len(files) == 1:
        if not alone:
            return cut_text(files[0], TRAIN)
        return cut_text(files[0], TRAIN, _split_place(files[0], fraction))
    if not files:
        return []
    train, held = split_documents(files, fraction)
    spans = [span for file in train for span in cut_text(file, TRAIN)]
    return spans + [span for file in held for span in cut_text(file, VALIDATION)]


def _split_place(file: DataFile, fraction: float) -> int:
    """Where the held-out part of a text begins: at a line, near the end."""
    wanted = int(file.size_bytes * (1 - fraction))
    place = line_border(file.path, wanted)
    if place >= file.size_bytes:
        start = max(0, wanted - PIECE_BYTES)
        before = read_bytes(file.path, start, wanted)
        place = start + before.rfind(b"\n") + 1
        if before.rfind(b"\n") < 0:
            raise TrainValueError(
                f"{file.shown} is one line, so no part of it can be held out for validation; write "
                "it in lines, or add a second file"
            )
    return place


def _row_spans(
    source: SourceConfig, cuts: Sequence[FileCut], fraction: float, alone: bool
) -> list[Span]:
    spans = [span for cut in cuts for span in cut.spans]
    if not fraction or not alone or sum(cut.num_rows for cut in cuts) != 1:
        return spans
    file = spans[0].file
    if file.format in ("jsonl", "parquet"):
        raise TrainValueError(
            f"{file.shown} has one row, but one is held out for validation and one trained on; add "
            "rows"
        )
    num_tokens = spans[-1].stop
    place = max(1, int(num_tokens * (1 - fraction)))
    found = []
    for span in spans:
        for start, stop in (
            (span.start, min(place, span.stop)),
            (max(place, span.start), span.stop),
        ):
            if start < stop:
                part = TRAIN if stop <= place else VALIDATION
                begins = start in (0, place)
                found.append(replace(span, start=start, stop=stop, part=part, begins=begins))
    return found


def digest_of(parts: Sequence[str]) -> str:
    """Hex digits that stand for a list of texts."""
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode("utf-8", "surrogateescape")
        state.update(len(data).to_bytes(8, "little") + data)
    return state.hexdigest()


def _nothing_message(source: SourceConfig, files: Sequence[DataFile]) -> str:
    place = "data" if source.name == "data" else source.place
    if not files:
        return f"{place}.corpus={list(source.corpus)} has no file with content; name other files"
    shown = ", ".join(file.shown for file in files[:3]) + (", ..." if len(files) > 3 else "")
    what = "UTF-8 text" if files[0].format == "text" else f"rows or tokens of kind {source.kind}"
    return (
        f"{place}.corpus has no {what}: {len(files)} file(s) were looked into ({shown}); is it "
        f"binary or empty? Name other files, or set {place}.format and {place}.kind to what they "
        "hold"
    )
