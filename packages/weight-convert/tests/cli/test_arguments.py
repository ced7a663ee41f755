import argparse

import pytest

from weight_convert.cli.arguments import parse_size


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("17", 17), ("5GB", 5 * 10**9), ("1.5kb", 1500), ("2 MiB", 2 << 20), ("1TiB", 1 << 40)],
)
def test_sizes_are_read(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "GB", "5XB", "-1", "0", "0.1", "1e9", "9" * 400 + "GB"])
def test_nonsense_sizes_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"is no size|less than one byte"):
        parse_size(text)
