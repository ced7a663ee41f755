from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from moe_train.data.tokenizer import (
    END_OF_TEXT,
    encode_batch,
    end_token_id,
    load_tokenizer,
    train_bpe,
)

SAMPLE = ["def f(x):\n    return x + 1\n" * 20, "class A:\n    pass\n" * 20]
TOKENIZER = train_bpe(SAMPLE, vocab_size=300)


@given(st.text(st.characters(exclude_categories=("Cs",))))
def test_any_text_is_encoded_without_loss(text: str) -> None:
    ids = encode_batch(TOKENIZER, [text])[0]
    assert TOKENIZER.decode(ids.tolist(), skip_special_tokens=False) == text


def test_text_like_a_special_token_is_text() -> None:
    text = f"a {END_OF_TEXT} b"
    ids = encode_batch(TOKENIZER, [text])[0]
    assert 0 not in ids.tolist()
    assert TOKENIZER.decode(ids.tolist()) == text


def test_same_texts_give_the_same_tokenizer() -> None:
    assert train_bpe(iter(SAMPLE), vocab_size=300).to_str() == TOKENIZER.to_str()


def test_end_of_text_is_token_0_and_the_bytes_follow() -> None:
    assert end_token_id(TOKENIZER, "") == 0
    assert train_bpe(["a"], vocab_size=257).get_vocab_size() == 257
    assert 257 < TOKENIZER.get_vocab_size() <= 300


def test_empty_texts_and_batches_encode_to_nothing() -> None:
    assert encode_batch(TOKENIZER, []) == []
    assert encode_batch(TOKENIZER, [""])[0].tolist() == []


def test_unusable_tokenizer_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    with pytest.raises(ValueError, match="cannot be read"):
        load_tokenizer(path)
    path.write_text('{"model": 3}')
    with pytest.raises(ValueError, match=r"is not a tokenizer\.json"):
        load_tokenizer(path)
    path.write_bytes(b"\xff")
    with pytest.raises(ValueError, match="cannot be read"):
        load_tokenizer(path)


def test_tokenizer_without_an_end_token_is_refused() -> None:
    plain = Tokenizer(WordLevel({"a": 0}, unk_token="a"))
    with pytest.raises(ValueError, match=r"x\.json has no end-of-text token"):
        end_token_id(plain, "x.json")
    plain.add_special_tokens(["</s>"])
    assert end_token_id(plain, "") == 1
