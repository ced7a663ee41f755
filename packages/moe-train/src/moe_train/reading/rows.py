"""Rows of JSONL and Parquet files, any part of a file by itself.

pyarrow and the json module of Python read them, not Hugging Face's `datasets`: it brings a dozen
packages and takes seconds to import; it copies the corpus into a cache of its own before the first
row is seen; and its one schema for a whole file refuses conversations whose messages have different
keys (tool calls, weights). Parts by byte ranges and row groups are all that preparing needs.

Invariant: rows are numbered from 0 in each file, whatever part is read.

    for row in jsonl_rows(file, 0, 1000, first_row=0):
        field_of(row.value, "meta.text", file_place(file, row))
"""

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from moe_train.errors import TrainValueError
from moe_train.reading.formats import DataFile
from moe_train.reading.text_files import BOM, read_bytes

_BATCH_ROWS = 1024
# Fields that tell of which kind rows are, for people who left it at text.
_KIND_OF_FIELD = {
    "messages": "chat",
    "conversations": "chat",
    "choices": "multiple_choice",
    "chosen": "preference",
    "anchor": "embedding",
    "input_ids": "tokens",
}


@dataclass(frozen=True, slots=True)
class Row:
    """A row: its number in the file and its fields."""

    number: int
    value: Mapping[str, Any]


def place_of(file: DataFile, number: int) -> str:
    """A row for messages: lines are counted from 1, rows of Parquet from 0."""
    return f"{file.shown}, " + (f"line {number + 1}" if file.format == "jsonl" else f"row {number}")


def jsonl_rows(file: DataFile, start: int, stop: int, first_row: int) -> Iterator[Row | int]:
    """Rows of the lines in the bytes [start, stop), which are whole lines; an empty one's number.

    Raises:
        ValueError: a line is not UTF-8 or not a JSON object.
    """
    lines = read_bytes(file.path, start, stop).split(b"\n")
    if start == 0:
        lines[0] = lines[0].removeprefix(BOM)
    if not lines[-1]:
        lines.pop()
    for index, line in enumerate(lines):
        number = first_row + index
        lines[index] = b""  # what is read is given back
        if not line or line.isspace():
            yield number
            continue
        try:
            value = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            hint = "write one JSON object in each line"
            if number == 0 and line.lstrip()[:1] == b"[":
                hint = "the file holds one JSON array; write its records as lines: jq -c '.[]'"
            raise TrainValueError(
                f"{place_of(file, number)} is not JSON: {error}; {hint}"
            ) from None
        if not isinstance(value, dict):
            raise TrainValueError(
                f"{place_of(file, number)} holds JSON of type {type(value).__name__}, expected an "
                "object; write one JSON object in each line"
            )
        yield Row(number, value)


def open_parquet(file: DataFile) -> pq.ParquetFile:
    """Open a Parquet file.

    Raises:
        ValueError: it is none, or it is cut off.
    """
    try:
        return pq.ParquetFile(file.path)
    except (pa.ArrowException, OSError) as error:
        raise TrainValueError(f"{file.shown} is not a Parquet file: {error}") from error


def parquet_rows(
    file: DataFile, start: int, stop: int, fields: Sequence[str]
) -> Iterator[Row | int]:
    """Rows [start, stop) with those of the top fields that the file has.

    Raises:
        ValueError: the file cannot be read.
    """
    reader = open_parquet(file)
    columns = [name for name in reader.schema_arrow.names if name in fields]
    if not columns:
        wanted = fields[0]
        raise TrainValueError(
            f"{file.shown} has no field {wanted!r}; {_hint(wanted, reader.schema_arrow.names)}"
        )
    first = 0
    for group in range(reader.num_row_groups):
        end = first + reader.metadata.row_group(group).num_rows
        if first < stop and start < end:
            try:
                yield from _group_rows(reader, group, first, (start, stop), columns)
            except (pa.ArrowException, OSError) as error:
                raise TrainValueError(
                    f"{file.shown}, row group {group} cannot be read: {error}; copy it again"
                ) from error
        first = end


def _group_rows(
    reader: pq.ParquetFile, group: int, first: int, wanted: tuple[int, int], columns: list[str]
) -> Iterator[Row]:
    for batch in reader.iter_batches(_BATCH_ROWS, row_groups=[group], columns=columns):
        low, high = max(first, wanted[0]), min(first + batch.num_rows, wanted[1])
        if low < high:
            values = batch.slice(low - first, high - low).to_pylist()
            yield from (Row(low + index, value) for index, value in enumerate(values))
        first += batch.num_rows
        if first >= wanted[1]:
            return


def field_of(value: Mapping[str, Any], field: str, place: str) -> Any:
    """A field by its name, "a.b" for field b of field a; None where it is null.

    Raises:
        ValueError: there is no such field; the message names the nearest one.
    """
    if field in value:
        return value[field]
    found: Any = value
    walked = ""
    for name in field.split("."):
        if found is None:
            return None
        if not isinstance(found, Mapping) or name not in found:
            known = found if isinstance(found, Mapping) else ()
            where = f"{walked} has" if walked else "there is"
            raise TrainValueError(f"{place}: {where} no field {name!r}; {_hint(name, known)}")
        found = found[name]
        walked = f"{walked}.{name}" if walked else name
    return found


def _hint(name: str, known: Any) -> str:
    names = [str(each) for each in known]
    close = difflib.get_close_matches(name, names, n=1)
    kind = next((kind for field, kind in _KIND_OF_FIELD.items() if field in names), None)
    meant = f"did you mean {close[0]!r}? " if close else ""
    other = f'rows with these fields are of kind "{kind}", so set that; or ' if kind else ""
    return f'{meant}{other}set "field" of the source to one of: {", ".join(names[:20]) or "(none)"}'
