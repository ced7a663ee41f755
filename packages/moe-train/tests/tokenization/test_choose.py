"""Which tokenizer a job uses, and what its files say once the keys are applied."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from moe_train.config import Config
from moe_train.model import DecoderConfig
from moe_train.tokenization import (
    TextTokenizer,
    choose_tokenizer,
    describe_choice,
    load_tokenizer,
    train_settings,
    train_tokenizer,
    vocabulary_rows,
)

Configure = Callable[..., Config]
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.fixture
def source(configure: Configure, tmp_path: Path) -> Path:
    """A folder as transformers saves it, with a tokenizer trained on few words."""
    folder = tmp_path / "source"
    folder.mkdir()
    trained = train_tokenizer(["def self value return " * 20], configure())
    for name, content in trained.files.items():
        (folder / name).write_bytes(content)
    (folder / "config.json").write_bytes((tmp_path / "config.json").read_bytes())
    (folder / "chat_template.jinja").write_text(CHATML)
    return folder


def chosen(config: Config) -> TextTokenizer:
    tokenizer = choose_tokenizer(config)
    assert tokenizer is not None
    return tokenizer


def test_a_source_brings_its_tokenizer_byte_for_byte(configure: Configure, source: Path) -> None:
    config = configure(f"model.init_from={source}")
    tokenizer = chosen(config)
    given = {path.name: path.read_bytes() for path in source.iterdir()}
    del given["config.json"]
    assert tokenizer.files == given
    assert tokenizer.fingerprint == load_tokenizer(source).fingerprint
    assert describe_choice(config, tokenizer) == []
    assert choose_tokenizer(configure()) is None


def test_a_source_without_a_tokenizer_is_a_question(configure: Configure, source: Path) -> None:
    (source / "tokenizer.json").unlink()
    config = configure(f"model.init_from={source}")
    with pytest.raises(
        ValueError, match=r"no tokenizer to go on with.*tokenizer\.file.*train=true"
    ):
        choose_tokenizer(config)
    (source / "vocab.json").write_text("{}")
    with pytest.raises(
        ValueError, match=r"has vocab\.json but no tokenizer\.json.*save_pretrained"
    ):
        choose_tokenizer(config)
    trains = configure(f"model.init_from={source}", "tokenizer.train=true")
    assert choose_tokenizer(trains) is None
    made = train_tokenizer(["a b c"], trains)
    assert "whose rows lose their meaning" in describe_choice(trains, made)[0]


def test_another_tokenizer_is_allowed_and_said(
    configure: Configure, source: Path, tmp_path: Path
) -> None:
    values = json.loads((source / "tokenizer.json").read_text())
    vocab = values["model"]["vocab"]
    vocab["!"], vocab["#"] = vocab["#"], vocab["!"]
    other = tmp_path / "other.json"
    other.write_text(json.dumps(values))
    config = configure(f"model.init_from={source}", f"tokenizer.file={other}")
    assert "in 2 ids" in describe_choice(config, chosen(config))[0]
    generation = "generation_config.json"
    assert chosen(config).files[generation] == (source / generation).read_bytes()


def test_a_contradiction_is_decided_by_the_key(configure: Configure, source: Path) -> None:
    path = source / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": 2}))
    (source / "generation_config.json").unlink()
    with pytest.raises(ValueError, match=r"\(0\), but the model's files name eos_token_id=2"):
        choose_tokenizer(configure(f"model.init_from={source}"))
    config = configure(f"model.init_from={source}", "tokenizer.eos_token=<|endoftext|>")
    tokenizer = chosen(config)
    assert (tokenizer.eos_token_ids, tokenizer.document_end_id) == ((0,), 0)
    assert json.loads(tokenizer.files["generation_config.json"])["eos_token_id"] == 0
    assert "config.json names eos_token_id=2" in describe_choice(config, tokenizer)[0]


def test_new_tokens_are_single_ids_and_control_tokens_are_not_text(
    configure: Configure, source: Path, tmp_path: Path
) -> None:
    config = configure(
        f"model.init_from={source}",
        'tokenizer.new_tokens=["<think>", "def"]',
        'tokenizer.new_special_tokens=["<|im_start|>", "<|im_end|>"]',
        "tokenizer.eos_token=<|im_end|>",
        "tokenizer.pad_vocab_multiple=64",
    )
    before, tokenizer = load_tokenizer(source), chosen(config)
    size = before.vocab_size
    assert tokenizer.encode_prompt("<|im_start|><|im_end|><think>") == [size, size + 1, size + 2]
    assert tokenizer.vocab_size == size + 3  # "def" was a token
    assert size not in tokenizer.encode_batch(["<|im_start|>"])[0]
    assert tokenizer.decode([size, size + 2, size + 1]) == "<think>"
    assert tokenizer.eos_token_ids == (size + 1,)
    found = tokenizer.encode_chat([{"role": "user", "content": "def"}])
    assert found.ids[0] == size
    model = DecoderConfig.from_file(source)
    assert vocabulary_rows(config, model.vocab_size) % 64 == 0
    assert vocabulary_rows(config, model.vocab_size) >= model.vocab_size
    carried = tmp_path / "carried"
    carried.mkdir()
    for name, content in tokenizer.files.items():
        (carried / name).write_bytes(content)
    assert load_tokenizer(carried).fingerprint == tokenizer.fingerprint


def test_a_trained_tokenizer_takes_the_keys_too(configure: Configure, tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text(CHATML)
    config = configure(
        f"tokenizer.chat_template={tmp_path / 'chat.jinja'}",
        'tokenizer.new_special_tokens=["<|im_start|>", "<|im_end|>"]',
        eos_token_id=2,
    )
    tokenizer = train_tokenizer(["def self"], config)
    assert tokenizer.render_chat([{"role": "user", "content": "x"}]).endswith("<|im_end|>\n")
    assert (tokenizer.document_end_id, tokenizer.eos_token_ids) == (0, (0,))
    assert "checkpoints say so" in describe_choice(config, tokenizer)[0]
    assert train_settings(config) != train_settings(configure())
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.chat_template=.* does not exist"):
        train_settings(configure("tokenizer.chat_template=/no.jinja"))
