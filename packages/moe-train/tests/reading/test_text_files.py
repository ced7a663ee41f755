import random
from pathlib import Path

import pytest

from moe_train.reading import text_files
from moe_train.reading.text_files import (
    as_text,
    line_border,
    looks_binary,
    read_part,
    row_border,
)


def test_text_is_read_without_loss_or_not_at_all() -> None:
    for data, text in (
        (b"\xc3\xa9\r\n\tx", "é\r\n\tx"),
        (b"\xef\xbb\xbfx", "\ufeffx"),
        (b"\xff", None),
        (b"a\0b", None),
        (b"", ""),
    ):
        assert as_text(data) == text


@pytest.mark.parametrize("border", [line_border, row_border])
def test_borders_are_where_lines_begin(tmp_path: Path, border: object) -> None:
    path = tmp_path / "a.txt"
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    text = "".join("é" * rng.randint(0, 9) + "\n" for _ in range(50)) + "end"
    data = text.encode()
    path.write_bytes(data)
    begins = [0] + [i + 1 for i, byte in enumerate(data) if byte == 10] + [len(data)]
    for place in range(len(data) + 1):
        expected = min(begin for begin in begins if begin >= place)
        assert border(path, place) == expected, (seed, place)  # type: ignore[operator]


def test_a_long_line_is_cut_between_characters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_files, "_SEARCH_BYTES", 16)
    path = tmp_path / "a.txt"
    path.write_text("é" * 100, encoding="utf-8")
    for place in range(1, 150):
        cut = line_border(path, place)
        assert place <= cut <= place + 1
        assert read_part(path, 0, cut) + read_part(path, cut, 200) == "é" * 100


def test_a_part_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"text\n\xff")
    with pytest.raises(ValueError, match=r"a\.txt is not UTF-8 text between bytes 5 and 6"):
        read_part(path, 5, 6)


def test_only_the_beginning_tells_of_binary_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_files, "_SNIFF_BYTES", 5)
    path = tmp_path / "a"
    for content, binary in (
        (b"ab\xc3\xa9c\xc3\xa9", False),
        (b"abcd\xc3\xa9", False),
        (b"a\0bcdef", True),
    ):
        path.write_bytes(content)
        assert looks_binary(path) == binary
