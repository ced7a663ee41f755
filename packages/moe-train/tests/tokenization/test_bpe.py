from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from moe_train.tokenization.bpe import END_OF_TEXT, train_bpe
from moe_train.tokenization.edits import agreed
from moe_train.tokenization.end_tokens import EndTokens
from moe_train.tokenization.text_tokenizer import TextTokenizer, parse_tokenizer

SAMPLE = ["def f(x):\n    return x + 1\n" * 20, "class A:\n    pass\n" * 20]
ENDS = EndTokens(document_end_id=0, eos_token_ids=(0,), pad_token_id=0)


def trained(texts: Iterable[str], vocab_size: int) -> TextTokenizer:
    files = train_bpe(texts, vocab_size=vocab_size)
    tokenizer = agreed(files, parse_tokenizer(files), ENDS)
    assert tokenizer.files == files
    return tokenizer


TOKENIZER = trained(SAMPLE, 300)


@given(st.text(st.characters(exclude_categories=("Cs",))))
def test_any_text_is_encoded_without_loss(text: str) -> None:
    ids = TOKENIZER.encode_batch([text])[0]
    assert TOKENIZER.decode(ids.tolist(), skip_special_tokens=False) == text


def test_text_like_a_special_token_is_text() -> None:
    text = f"a {END_OF_TEXT} b"
    ids = TOKENIZER.encode_batch([text])[0]
    assert 0 not in ids.tolist()
    assert TOKENIZER.decode(ids.tolist()) == text


def test_same_texts_give_the_same_tokenizer() -> None:
    again = trained(iter(SAMPLE), 300)
    assert (again.files, again.fingerprint) == (TOKENIZER.files, TOKENIZER.fingerprint)


def test_end_of_text_is_token_0_and_the_bytes_follow() -> None:
    assert TOKENIZER.document_end_id == TOKENIZER.pad_token_id == 0
    assert TOKENIZER.eos_token_ids == (0,)
    assert trained(["a"], 257).vocab_size == 257
    assert 257 < TOKENIZER.vocab_size <= 300


def test_empty_texts_and_batches_encode_to_nothing() -> None:
    assert TOKENIZER.encode_batch([]) == []
    assert TOKENIZER.encode_batch([""])[0].tolist() == []
