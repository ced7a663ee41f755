"""Each rule of which tokens end a text; transformers is the oracle in the seam test."""

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from moe_train.tokenization.end_tokens import EndTokens, NamedIds, end_tokens, token_ids_of

END = "<｜end▁of▁sentence｜>"


@pytest.fixture
def tokenizer() -> Tokenizer:
    tokens = ["a", "b", '"', "<|endoftext|>", END, "<pad>", "<|im_end|>"]
    made = Tokenizer(WordLevel({token: n for n, token in enumerate(tokens)}, unk_token="a"))
    made.add_special_tokens(tokens[3:])
    return made


def ends(document: int, *others: int, pad: int | None = None) -> EndTokens:
    return EndTokens(
        document_end_id=document,
        eos_token_ids=(document, *others),
        pad_token_id=document if pad is None else pad,
    )


def test_any_token_that_the_tokenizer_names_ends_a_text(tokenizer: Tokenizer) -> None:
    named = {"eos_token": END}
    for ids in (NamedIds(), NamedIds(config=(4,)), NamedIds(generation=(4,))):
        assert end_tokens(tokenizer, named, ids, pretrained=True) == ends(4)


def test_every_named_end_token_is_accepted_and_the_tokenizers_comes_first(
    tokenizer: Tokenizer,
) -> None:
    ids = NamedIds(config=(3,), generation=(6, 3))
    named = {"eos_token": "<|im_end|>", "pad_token": "<pad>"}
    assert end_tokens(tokenizer, named, ids, pretrained=True) == ends(6, 3, pad=5)
    assert end_tokens(tokenizer, {}, ids, pretrained=True) == ends(3, 6)


def test_contradictions_of_a_pretrained_model_name_both_sides_and_the_key(
    tokenizer: Tokenizer,
) -> None:
    named = {"eos_token": END}
    with pytest.raises(
        ValueError, match=r"eos_token is '.*' \(4\), but .*=2 \('\"'\); set tokenizer\.eos_token to"
    ):
        end_tokens(tokenizer, named, NamedIds(config=(2,)), pretrained=True)
    with pytest.raises(ValueError, match=r"config\.json names eos_token_id=4 .*config\.json 6"):
        end_tokens(tokenizer, named, NamedIds(config=(4,), generation=(6,)), pretrained=True)
    with pytest.raises(ValueError, match=r"config\.json names eos_token_id=99, which is no token"):
        end_tokens(tokenizer, named, NamedIds(config=(4, 99)), pretrained=True)
    with pytest.raises(ValueError, match=r"eos_token of the tokenizer is '</s>', which is no"):
        end_tokens(tokenizer, {"eos_token": "</s>"}, NamedIds(), pretrained=True)


def test_the_key_decides(tokenizer: Tokenizer) -> None:
    named = {"eos_token": END}
    for ids, expected in (
        (NamedIds(config=(2,)), ends(6)),
        (NamedIds(config=(3, 6)), ends(6, 3)),
        (NamedIds(config=(3,), generation=(6, 4)), ends(6, 4)),
        (NamedIds(), ends(6)),
    ):
        found = end_tokens(tokenizer, named, ids, pretrained=True, decided="<|im_end|>")
        assert found == expected
    with pytest.raises(ValueError, match=r"tokenizer\.eos_token is '<eos>', which is no token"):
        end_tokens(tokenizer, named, NamedIds(), pretrained=True, decided="<eos>")


def test_a_new_model_leaves_out_ids_that_are_ordinary_tokens(tokenizer: Tokenizer) -> None:
    named = {"eos_token": END}
    for given, expected in (((2,), ends(4)), ((4, 2, 3, 99), ends(4, 3)), ((3,), ends(4))):
        ids = NamedIds(config=given)
        assert end_tokens(tokenizer, named, ids, pretrained=False) == expected
    assert end_tokens(tokenizer, {}, NamedIds(config=(2, 6)), pretrained=False) == ends(6)


def test_a_new_model_takes_no_ids_of_a_file_that_does_not_name_the_tokenizers_own(
    tokenizer: Tokenizer,
) -> None:
    """Else a stale id of config.json, of its BOS perhaps, would end documents."""
    named = {"eos_token": END}
    for ids, expected in (
        (NamedIds(config=(3,), generation=(4,)), ends(4)),
        (NamedIds(config=(4, 3), generation=(6,)), ends(4, 3)),
        (NamedIds(config=(3,), generation=(6, 4)), ends(4, 6)),
    ):
        assert end_tokens(tokenizer, named, ids, pretrained=False) == expected
    stale = NamedIds(config=(3,), generation=(6,))
    assert end_tokens(tokenizer, {}, stale, pretrained=False) == ends(3, 6)


def test_a_tokenizer_that_names_nothing_has_a_usual_end_token_or_is_refused(
    tokenizer: Tokenizer,
) -> None:
    assert end_tokens(tokenizer, {}, NamedIds(), pretrained=True) == ends(3)
    plain = Tokenizer(WordLevel({"a": 0}, unk_token="a"))
    with pytest.raises(ValueError, match=r"no end-of-text token.*set tokenizer\.eos_token"):
        end_tokens(plain, {}, NamedIds(), pretrained=True)


def test_ids_are_integers() -> None:
    assert token_ids_of({"e": None}, "e", "x") == token_ids_of({}, "e", "x") == ()
    assert token_ids_of({"e": [1, 0]}, "e", "x") == (1, 0)
    with pytest.raises(ValueError, match=r"x: e=True; expected an integer or a list"):
        token_ids_of({"e": True}, "e", "x")
