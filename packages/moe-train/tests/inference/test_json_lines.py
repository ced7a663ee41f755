"""Files that cannot be read are named; so is the line of a record."""

from pathlib import Path

import pytest

from moe_train.inference.json_lines import read_records


def test_line_numbers_count_empty_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\r\n\r\n{"b": "\xe2\x80\xa8"}\n')
    assert read_records(path) == [(1, {"a": 1}), (3, {"b": "\u2028"})]


def test_a_file_without_records_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with pytest.raises(FileNotFoundError, match=r"a\.jsonl does not exist"):
        read_records(path)
    path.write_text("\n")
    with pytest.raises(ValueError, match=r"a\.jsonl holds no records"):
        read_records(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"a\.jsonl cannot be read as UTF-8 text"):
        read_records(path)


def test_a_byte_order_mark_is_no_part_of_the_first_record(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\n{"b": 2}\n')
    assert read_records(path) == [(1, {"a": 1}), (2, {"b": 2})]


def test_a_record_that_is_nested_too_deep_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n' + '{"a":' * 100_000 + "\n")
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2: not JSON \(maximum recursion"):
        read_records(path)
