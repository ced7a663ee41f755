"""A piece of a corpus, from files to token ids: what each process that prepares runs.

Documents of text end with the tokenizer's document end. A conversation ends as its template ends
it, and gets a document end only where the template writes no end token there. Arrays of tokens stay
as they are.

    piece = encode_piece(spans, job, tokenizer)
    piece.parts["train"].tokens
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_train.errors import TrainValueError
from moe_train.reading.arrays import ATTENTION, check_ids, open_array
from moe_train.reading.records import (
    Conversation,
    columns_of,
    conversation,
    embedding_pair,
    preference,
)
from moe_train.reading.rows import Row, field_of, jsonl_rows, parquet_rows, place_of
from moe_train.reading.spans import BY_ROW, TRAIN, VALIDATION, Span, document_begins, row_hashes
from moe_train.reading.text_files import read_part
from moe_train.reading.token_rows import token_row
from moe_train.tokenization import TextTokenizer, whole_text

_BATCH_CHARACTERS = 1 << 19
_HASHED_ROWS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeJob:
    """What is done with every piece of a source.

    Attributes:
        kind: what the source holds.
        field: the field of its rows.
        dtype: numbers of raw .bin files.
        hold_below: rows whose hash is below it are held out.
        keep_below: rows whose second hash is below it are used; None: all.
    """

    kind: str
    field: str
    dtype: str
    hold_below: int
    keep_below: int | None


@dataclass(slots=True, kw_only=True)
class EncodedPart:
    """The documents of one split: ids [N], where documents begin [D], targets [N] (None: all)."""

    tokens: NDArray[Any]
    begins: NDArray[np.int64]
    trained: NDArray[np.uint8] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPiece:
    """The splits of a piece, and how many of what was left out, by reason."""

    parts: Mapping[str, EncodedPart]
    left_out: Mapping[str, int]


@dataclass(slots=True)
class _Collected:
    """The documents of a split while they come."""

    tokens: list[NDArray[Any]] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)
    trained: list[NDArray[Any]] = field(default_factory=list)
    masked: bool = False
    size: int = 0

    def add(
        self, ids: NDArray[Any], trained: NDArray[Any] | None = None, *, begins: bool = True
    ) -> None:
        if begins:
            self.begins.append(self.size)
        self.tokens.append(ids)
        self.masked = self.masked or trained is not None
        self.trained.append(np.ones(len(ids), np.uint8) if trained is None else trained != 0)
        self.size += len(ids)

    def joined(self, vocab_size: int) -> EncodedPart:
        dtype = np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
        parts = [ids.astype(dtype) for ids in self.tokens]
        masks = [mask.astype(np.uint8) for mask in self.trained] if self.masked else None
        return EncodedPart(
            tokens=np.concatenate(parts) if parts else np.empty(0, dtype),
            begins=np.array(self.begins, np.int64),
            trained=np.concatenate(masks) if masks else None,
        )


def encode_piece(spans: Sequence[Span], job: EncodeJob, tokenizer: TextTokenizer) -> EncodedPiece:
    """Read and tokenize the spans of a piece.

    Raises:
        ValueError: a file or row is not what the job expects; names file, row and field.
    """
    encoder = _Encoder(job, tokenizer)
    for span in spans:
        if span.file.format == "text":
            text = read_part(span.file.path, span.start, span.stop)
            encoder.add_text(span.part, text, begins=span.begins, ends=span.ends)
        elif span.file.format in ("jsonl", "parquet"):
            encoder.add_rows(span)
        else:
            encoder.add_array(span)
    return encoder.finish()


def span_texts(span: Span, job: EncodeJob) -> Iterator[str]:
    """The texts of a span's training documents, as a sample to train a tokenizer on."""
    if span.file.format == "text":
        if span.part == TRAIN:
            yield read_part(span.file.path, span.start, span.stop)
        return
    split = _RowSplit(span, job)
    for row in _rows(span, columns_of(job.kind, job.field)):
        if isinstance(row, Row) and split.part_of(row.number) == TRAIN:
            text = field_of(row.value, job.field, place_of(span.file, row.number))
            if isinstance(text, str):
                yield whole_text(text)


class _Encoder:
    def __init__(self, job: EncodeJob, tokenizer: TextTokenizer) -> None:
        self._job = job
        self._tokenizer = tokenizer
        self._parts = {TRAIN: _Collected(), VALIDATION: _Collected()}
        self._left_out: Counter[str] = Counter()
        self._waiting: list[tuple[str, str, bool, bool]] = []  # part, text, begins, ends
        self._characters = 0

    def finish(self) -> EncodedPiece:
        self._flush()
        size = self._tokenizer.vocab_size
        parts = {name: part.joined(size) for name, part in self._parts.items()}
        return EncodedPiece(parts=parts, left_out=dict(self._left_out))

    def add_text(self, part: str, text: str, *, begins: bool, ends: bool) -> None:
        """Text in the order in which it comes, tokenized many at a time."""
        self._waiting.append((part, text, begins, ends))
        self._characters += len(text)
        if self._characters >= _BATCH_CHARACTERS:
            self._flush()

    def _flush(self) -> None:
        texts = [text for _, text, begins, _ in self._waiting if begins]
        encoded = iter(self._tokenizer.encode_batch(texts))
        for part, text, begins, ends in self._waiting:
            own = next(encoded) if begins else self._tokenizer.encode_rest(text)
            whole = np.append(own, self._tokenizer.document_end_id) if ends else own
            self._parts[part].add(whole, begins=begins)
        self._waiting, self._characters = [], 0

    def add_array(self, span: Span) -> None:
        """A part of an array of tokens: each document goes to its split."""
        array = open_array(span.file, self._job.dtype)
        ids = np.asarray(array.ids[span.start : span.stop])
        check_ids(ids, self._tokenizer.vocab_size, span.file, span.start)
        trained = None if array.trained is None else array.trained[span.start : span.stop]
        begins = document_begins(array, span.start, span.stop, self._tokenizer.document_end_id)
        split = _RowSplit(span, self._job)
        cuts = [*begins.tolist(), len(ids)]
        if not len(begins) or begins[0] > 0:  # goes on with the last document of the span before
            begins_here = span.part != BY_ROW and span.begins
            part = split.part_of(span.first_row - 1)
            self._add_slice(part, ids, trained, (0, cuts[0]), begins_here)
        for index, start in enumerate(begins.tolist()):
            part = split.part_of(span.first_row + index)
            self._add_slice(part, ids, trained, (start, cuts[index + 1]), True)

    def _add_slice(
        self,
        part: str | None,
        ids: NDArray[Any],
        trained: NDArray[Any] | None,
        places: tuple[int, int],
        begins: bool,
    ) -> None:
        if part is None:
            self._left_out["documents beyond max_bytes"] += begins
            return
        own = slice(*places)
        mask = None if trained is None else trained[own]
        self._parts[part].add(ids[own], mask, begins=begins)

    def add_rows(self, span: Span) -> None:
        """Rows of JSONL or Parquet: each goes to its split."""
        job = self._job
        split = _RowSplit(span, job)
        for row in _rows(span, columns_of(job.kind, job.field)):
            if not isinstance(row, Row):
                self._left_out["empty lines"] += 1
                continue
            part = split.part_of(row.number)
            if part is None:
                self._left_out["rows beyond max_bytes"] += 1
                continue
            place = place_of(span.file, row.number)
            if job.kind == "text":
                self._add_text_row(part, row.value, place)
            elif job.kind == "chat":
                self._add_chat(part, conversation(row.value, job.field, place), place)
            elif job.kind == "tokens":
                self._add_ids(part, row.value, place, span)
            else:
                self._add_pair(part, row.value, place)

    def _add_text_row(self, part: str, value: Mapping[str, Any], place: str) -> None:
        text = field_of(value, self._job.field, place)
        if text is None or text == "":
            self._left_out["rows without text"] += 1
            return
        if not isinstance(text, str):
            raise TrainValueError(
                f"{place}: field {self._job.field!r} holds {type(text).__name__} {text!r:.50}, "
                'expected text; set "field" of the source to the field with the text'
            )
        self.add_text(part, self._whole(text), begins=True, ends=True)

    def _whole(self, text: str) -> str:
        """The text without halves of characters, which are counted."""
        if text.isascii():
            return text
        whole = whole_text(text)
        if whole != text:
            self._left_out["halves of characters (U+FFFD took their place)"] += 1
        return whole

    def _whole_in(self, value: Any) -> Any:
        """The messages or tools with every text in them whole."""
        if isinstance(value, str):
            return self._whole(value)
        if isinstance(value, Mapping):
            return {self._whole_in(key): self._whole_in(each) for key, each in value.items()}
        return [self._whole_in(each) for each in value] if isinstance(value, list) else value

    def _add_chat(self, part: str, talk: Conversation, place: str) -> None:
        if not talk.messages:
            self._left_out["conversations without messages"] += 1
            return
        try:
            messages, tools = self._whole_in(talk.messages), self._whole_in(talk.tools)
            found = self._tokenizer.encode_chat(messages, tools=tools)
        except TrainValueError as error:
            raise TrainValueError(f"{place}: {error}") from error
        ids, trained = found.ids, found.trained
        if not self._ends_itself(ids):
            # It is a target where the assistant would otherwise never learn to end.
            ids = np.append(ids, self._tokenizer.document_end_id)
            trained = np.append(trained, bool(trained[-1]) if len(trained) else False)
        self._parts[part].add(ids, trained)

    def _ends_itself(self, ids: NDArray[np.int64]) -> bool:
        """Whether a conversation's last words are an end token, and at most white space."""
        ends = np.flatnonzero(np.isin(ids, self._tokenizer.eos_token_ids))
        if not len(ends):
            return False
        behind = self._tokenizer.decode(ids[ends[-1] + 1 :].tolist(), skip_special_tokens=False)
        return not behind.strip()

    def _add_ids(self, part: str, value: Mapping[str, Any], place: str, span: Span) -> None:
        row = token_row(value, self._job.field, place)
        if row is None or not len(row.ids):
            self._left_out["rows without tokens"] += 1
            return
        try:
            check_ids(row.ids, self._tokenizer.vocab_size, span.file, 0)
        except TrainValueError as error:
            raise TrainValueError(f"{place}, of {error}") from error
        if row.num_padding:
            self._left_out[f"tokens of padding ({ATTENTION} of 0)"] += row.num_padding
        self._parts[part].add(row.ids, row.trained)

    def _add_pair(self, part: str, value: Mapping[str, Any], place: str) -> None:
        """The texts of a pair as documents, so that their lengths can be seen."""
        if self._job.kind == "embedding":
            pair = embedding_pair(value, place)
            for text in (pair.anchor, pair.positive, *pair.negatives):
                self.add_text(part, self._whole(text), begins=True, ends=True)
            return
        found = preference(value, place)
        for answer in (found.chosen, found.rejected):
            if isinstance(answer, Conversation):
                self._add_chat(part, answer, place)
            else:
                self.add_text(part, self._whole(found.prompt + answer), begins=True, ends=True)


class _RowSplit:
    """The split of each row of a span; None where max_bytes leaves it out."""

    def __init__(self, span: Span, job: EncodeJob) -> None:
        self._span = span
        self._job = job
        self._first = 0
        self._parts: list[str | None] = []

    def part_of(self, number: int) -> str | None:
        if self._span.part != BY_ROW:
            return self._span.part
        if not self._first <= number < self._first + len(self._parts):
            self._first = number
            name, job = self._span.file.name, self._job
            held = row_hashes(name, number, _HASHED_ROWS) < np.uint64(job.hold_below)
            self._parts = [VALIDATION if out else TRAIN for out in held.tolist()]
            if job.keep_below is not None:
                kept = row_hashes(f"keep {name}", number, _HASHED_ROWS) < np.uint64(job.keep_below)
                pairs = zip(self._parts, kept.tolist(), strict=True)
                self._parts = [part if keep else None for part, keep in pairs]
        return self._parts[number - self._first]


def _rows(span: Span, columns: tuple[str, ...]) -> Iterator[Row | int]:
    if span.file.format == "parquet":
        return parquet_rows(span.file, span.start, span.stop, columns)
    return jsonl_rows(span.file, span.start, span.stop, span.first_row)
