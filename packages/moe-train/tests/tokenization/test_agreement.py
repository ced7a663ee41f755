from collections.abc import Callable
from pathlib import Path

import pytest

from moe_train.config import Config
from moe_train.tokenization import TextTokenizer, describe_choice, model_ids, train_tokenizer

Configure = Callable[..., Config]


@pytest.fixture
def trained(configure: Configure) -> TextTokenizer:
    return train_tokenizer(["def self value"], configure())


def test_special_tokens_of_a_new_model_become_those_of_the_tokenizer(
    configure: Configure, trained: TextTokenizer
) -> None:
    values = {"eos_token_id": [0, 2], "bos_token_id": 1, "pad_token_id": 500}
    expected = {"eos_token_id": (0,), "bos_token_id": None, "pad_token_id": 0}
    assert model_ids(configure(), trained, values) == expected
    assert model_ids(configure(), trained, {"eos_token_id": 0, "bos_token_id": 0}) == {}
    assert model_ids(configure(), trained, {}) == {"eos_token_id": (0,)}


def test_a_pretrained_model_keeps_what_is_no_contradiction(
    configure: Configure, trained: TextTokenizer, tmp_path: Path
) -> None:
    config = configure(f"model.init_from={tmp_path}")
    assert model_ids(config, trained, {"eos_token_id": 0, "bos_token_id": 1}) == {}
    anew = configure(f"model.init_from={tmp_path}", "tokenizer.train=true")
    assert model_ids(anew, trained, {"eos_token_id": 0, "bos_token_id": 1}) == {
        "bos_token_id": None
    }


def test_turns_that_generation_would_not_end_are_said(configure: Configure, tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    keys = (
        "data.kind=chat",
        f"tokenizer.chat_template={template}",
        "tokenizer.new_special_tokens=<|im_end|>",
    )
    config = configure(*keys)
    lines = describe_choice(config, train_tokenizer(["a b"], config))
    assert [line for line in lines if 'set tokenizer.eos_token="<|im_end|>"' in line] == lines
    assert len(lines) == 1
    ends = configure(*keys, "tokenizer.eos_token=<|im_end|>", eos_token_id=None)
    assert describe_choice(ends, train_tokenizer(["a b"], ends)) == []


def test_rows_are_said(configure: Configure, trained: TextTokenizer) -> None:
    config = configure("tokenizer.pad_vocab_multiple=64", vocab_size=300)
    assert "320 rows instead of 300" in describe_choice(config, trained)[0]
