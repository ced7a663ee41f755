import json
from pathlib import Path

import numpy as np
import pytest

from moe_train.data import token_store
from moe_train.data.token_store import damage_of, new_store, open_store, write_store


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(257, "uint16"), (65536, "uint16"), (65537, "uint32")]
)
def test_tokens_read_back_in_the_smallest_type(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    ids = np.array([0, 1, vocab_size - 1], dtype=np.int64)
    write_store(tmp_path / "a.bin", [ids, ids[:0], ids[::-1]], vocab_size=vocab_size)
    store = open_store(tmp_path / "a.bin")
    assert store.tokens.dtype == dtype
    assert store.tokens.tolist() == [*ids.tolist(), *ids[::-1].tolist()]
    assert (store.starts.tolist(), store.num_documents, store.trained) == ([0, 3, 3, 6], 3, None)


def test_masks_lie_beside_the_tokens(tmp_path: Path) -> None:
    documents, masks = [np.arange(3), np.arange(2)], [np.array([0, 1, 1]), np.array([True, False])]
    write_store(tmp_path / "a.bin", documents, vocab_size=9, trained=masks)
    trained = open_store(tmp_path / "a.bin").trained
    assert trained is not None
    assert trained.tolist() == [0, 1, 1, 1, 0]


def test_a_document_may_come_in_several_parts(tmp_path: Path) -> None:
    with new_store(tmp_path / "a.bin", vocab_size=9, with_mask=True) as writer:
        writer.add(np.arange(3), np.array([0]))
        writer.add(np.arange(4), np.array([2]))
        writer.add(np.arange(2), np.array([], np.int64))
    store = open_store(tmp_path / "a.bin")
    assert store.starts.tolist() == [0, 5, 9]
    assert store.trained is not None and store.trained.all()


def test_store_without_documents_is_empty(tmp_path: Path) -> None:
    write_store(tmp_path / "a.bin", [], vocab_size=300)
    store = open_store(tmp_path / "a.bin")
    assert (len(store.tokens), store.num_documents) == (0, 0)
    assert damage_of(tmp_path / "a.bin") == ""


def test_writer_that_fails_leaves_no_description(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), new_store(tmp_path / "a.bin", vocab_size=300) as writer:
        writer.add(np.arange(1), np.array([0]))
        raise RuntimeError
    with pytest.raises(ValueError, match="cannot be opened as a token file"):
        open_store(tmp_path / "a.bin")


def test_torn_and_mislabelled_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    write_store(path, [np.arange(10)], vocab_size=300)
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(ValueError, match="18 bytes, but its description has 10 entries of 2 bytes"):
        open_store(path)
    assert "18 bytes" in damage_of(path)
    facts = json.loads((tmp_path / "a.json").read_text())
    for wrong in ({**facts, "dtype": "float64"}, {"format": 1}, [], {**facts, "checksums": {}}):
        (tmp_path / "a.json").write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match=r"cannot be opened|describes no token file"):
            open_store(path)


@pytest.mark.parametrize("suffix", [".bin", ".starts", ".mask"])
def test_a_changed_byte_is_found_in_its_block(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_store, "_BLOCK_BYTES", 64)
    path = tmp_path / "a.bin"
    documents = [np.arange(1, 9)] * 30
    write_store(path, documents, vocab_size=300, trained=[np.ones(8)] * 30)
    assert damage_of(path) == ""
    file = path.with_suffix(suffix)
    content = bytearray(file.read_bytes())
    content[130] ^= 1
    file.write_bytes(content)
    assert f"{file} is damaged: bytes 128 to 192" in damage_of(path)
