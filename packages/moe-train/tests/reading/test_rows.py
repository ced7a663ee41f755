from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moe_train.reading.formats import DataFile
from moe_train.reading.rows import Row, field_of, jsonl_rows, parquet_rows

Make = Callable[[Path, str], DataFile]


def test_a_byte_order_mark_crlf_and_empty_lines_are_no_rows(
    tmp_path: Path, data_file: Make
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\r\n \n{"a": 2}')
    rows = list(jsonl_rows(data_file(path, "jsonl"), 0, path.stat().st_size, first_row=0))
    assert rows == [Row(0, {"a": 1}), 1, 2, Row(3, {"a": 2})]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"a": 1', r"a\.jsonl, line 2 is not JSON: .*one JSON object in each line"),
        (b"[1]", r"line 2 holds JSON of type list, expected an object"),
        (b'{"a": "\xff"}', r"line 2 is not JSON: .*utf-8"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, data_file: Make, line: bytes, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n' + line + b"\n")
    with pytest.raises(ValueError, match=message):
        list(jsonl_rows(data_file(path, "jsonl"), 0, path.stat().st_size, first_row=0))


def test_one_json_array_is_told_how_to_become_lines(tmp_path: Path, data_file: Make) -> None:
    path = tmp_path / "a.json"
    path.write_text('[\n{"text": "a"}\n]\n')
    with pytest.raises(ValueError, match=r"holds one JSON array; write its records as lines"):
        list(jsonl_rows(data_file(path, "jsonl"), 0, path.stat().st_size, first_row=0))


def test_any_rows_of_a_parquet_file_are_read(tmp_path: Path, data_file: Make) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"text": [f"t{i}" for i in range(100)], "other": range(100)})
    pq.write_table(table, path, row_group_size=30)
    file = data_file(path, "parquet")
    for start, stop in ((0, 100), (29, 31), (30, 60), (95, 100), (7, 8)):
        found = list(parquet_rows(file, start, stop, ["text"]))
        assert found == [Row(i, {"text": f"t{i}"}) for i in range(start, stop)]
    with pytest.raises(
        ValueError, match=r"has no field 'txt'; did you mean 'text'\? set \"field\""
    ):
        list(parquet_rows(file, 0, 1, ["txt"]))


def test_a_file_that_is_no_parquet_is_named(tmp_path: Path, read: Callable[..., Any]) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a", "b"]}), path)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"a\.parquet is not a Parquet file"):
        read(path)


def test_a_field_may_lie_in_another() -> None:
    row = {"a": {"b": {"c": 3}}, "x.y": 4, "n": None}
    assert field_of(row, "a.b.c", "p") == 3
    assert field_of(row, "x.y", "p") == 4
    assert field_of(row, "n.b", "p") is None
    with pytest.raises(ValueError, match=r"^p: a has no field 'bb'; did you mean 'b'\?"):
        field_of(row, "a.bb", "p")
    with pytest.raises(
        ValueError, match=r'no field \'zzz\'; set "field" of the source to one of: a'
    ):
        field_of(row, "zzz", "p")


def test_rows_of_another_kind_are_recognised() -> None:
    with pytest.raises(ValueError, match=r'are of kind "chat", so set that; or set "field"'):
        field_of({"id": 1, "messages": []}, "text", "here")


def test_a_line_that_is_nested_too_deep_is_named(tmp_path: Path, read: Callable[..., Any]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n{"text": ' + "[" * 100_000 + "\n")
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2 is not JSON: maximum recursion"):
        read(path)
