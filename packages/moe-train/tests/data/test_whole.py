"""All documents of files as sequences: each token but a document's first is a label once."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from moe_train.config import Config, SourceConfig
from moe_train.data import TokenFiles, prepare
from moe_train.data.token_store import open_store
from moe_train.tokenization import load_tokenizer


def source(path: Path, **changes: Any) -> SourceConfig:
    values = {"kind": "text", "format": "auto", "field": "text", "extensions": ("*",)}
    return SourceConfig(
        name="data", corpus=(str(path),), **{**values, "packing": "best_fit", **changes}
    )


@pytest.mark.parametrize("kind", ["one text", "texts", "one row", "rows"])
def test_no_document_is_held_out_or_cut(trained_run: Path, tmp_path: Path, kind: str) -> None:
    tokenizer = load_tokenizer(trained_run / "checkpoint-2")
    texts = ["def self\nreturn é\n" * (3 + n) for n in range(1 if "one" in kind else 5)]
    folder = tmp_path / "data"
    folder.mkdir()
    if "row" in kind:
        lines = [json.dumps({"text": text}) for text in texts]
        (folder / "a.jsonl").write_text("\n".join(lines) + "\n")
    else:
        for number, text in enumerate(texts):
            (folder / f"{number}.txt").write_text(text, encoding="utf-8")
    files = TokenFiles.of_source(source(folder), tokenizer, tmp_path / "made")
    store = open_store(files.paths[0])
    documents = [
        store.tokens[a:b].tolist() for a, b in zip(store.starts, store.starts[1:], strict=False)
    ]
    encoded = [[*ids.tolist(), tokenizer.document_end_id] for ids in tokenizer.encode_batch(texts)]
    assert sorted(documents) == sorted(encoded)
    assert files.num_bytes(tokenizer) == sum(len(text.encode()) for text in texts)
    split = files.open(7, tokenizer.pad_token_id)
    labels = split.batch(range(split.num_sequences)).labels.flatten().tolist()
    expected = Counter(token for document in encoded for token in document[1:])
    assert Counter(label for label in labels if label != -100) == expected


def test_of_conversations_only_what_is_trained_counts_and_bytes_are_not(
    configure: Callable[..., Config], tmp_path: Path
) -> None:
    prepared = prepare(configure())
    files = TokenFiles.of_corpus(prepared)
    assert files.paths == (prepared.sources[0].validation,)
    with pytest.raises(ValueError, match="kind='embedding' has no tokens to predict"):
        TokenFiles.of_source(source(tmp_path, kind="embedding"), prepared.tokenizer, tmp_path)


def test_bytes_are_those_of_the_text_without_begin_and_end(
    trained_run: Path, tmp_path: Path
) -> None:
    """What looks like a special token in the text is text."""
    plain = load_tokenizer(trained_run / "checkpoint-2")
    parsed = Tokenizer.from_buffer(plain.files["tokenizer.json"])
    parsed.add_special_tokens(["<s>"])
    begin = ("<s>", parsed.token_to_id("<s>"))
    parsed.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[begin])
    (tmp_path / "tokenizer").mkdir()
    parsed.save(str(tmp_path / "tokenizer" / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path / "tokenizer")
    end = plain.decode([plain.document_end_id], skip_special_tokens=False)
    texts = [f"def self {n} <s> é{end}\n" for n in range(4)]
    (tmp_path / "data").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "data" / f"{number}.txt").write_text(text, encoding="utf-8")
    files = TokenFiles.of_source(source(tmp_path / "data"), tokenizer, tmp_path / "made")
    assert open_store(files.paths[0]).tokens[0] == begin[1]
    assert files.num_bytes(tokenizer) == sum(len(text.encode()) for text in texts)
