import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from moe_train.data.token_file import open_tokens, write_tokens


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(257, "uint16"), (65536, "uint16"), (65537, "uint32")]
)
def test_tokens_read_back_in_the_smallest_type(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    ids = np.array([0, 1, vocab_size - 1], dtype=np.int64)
    write_tokens(tmp_path / "a.bin", [ids, ids[:0], ids[::-1]], vocab_size=vocab_size)
    tokens = open_tokens(tmp_path / "a.bin")
    assert tokens.dtype == dtype
    assert tokens.tolist() == [*ids.tolist(), *ids[::-1].tolist()]


def test_file_without_tokens_is_empty(tmp_path: Path) -> None:
    write_tokens(tmp_path / "a.bin", [], vocab_size=300)
    assert len(open_tokens(tmp_path / "a.bin")) == 0


def test_writer_that_fails_leaves_no_description(tmp_path: Path) -> None:
    def parts() -> Iterator[NDArray[np.int64]]:
        yield np.array([1])
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_tokens(tmp_path / "a.bin", parts(), vocab_size=300)
    with pytest.raises(ValueError, match="cannot be opened as a token file"):
        open_tokens(tmp_path / "a.bin")


def test_torn_and_mislabelled_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    write_tokens(path, [np.arange(10)], vocab_size=300)
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(ValueError, match=r"18 bytes, but a\.json describes 10 tokens of 2 bytes"):
        open_tokens(path)
    facts = json.loads((tmp_path / "a.json").read_text())
    for wrong in ({**facts, "dtype": "float64"}, {"format": 1}, []):
        (tmp_path / "a.json").write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match="cannot be opened"):
            open_tokens(path)
