import json
import random
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.normalizers import Prepend, Replace, Sequence
from tokenizers.pre_tokenizers import Metaspace
from tokenizers.processors import TemplateProcessing

from moe_train.reading import spans
from moe_train.reading.encode import EncodeJob, encode_piece
from moe_train.reading.formats import DataFile
from moe_train.tokenization import TextTokenizer
from moe_train.tokenization.end_tokens import EndTokens

ROWS = [{"text": f"row {index} é" + "x" * (index % 7), "id": index} for index in range(60)]
WHOLE = sorted(f"{row['text']}<|end|>" for row in ROWS)
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
Jsonl = Callable[..., Path]
Reader = Callable[..., Any]


def test_rows_come_whole_whatever_the_pieces_and_the_format(
    tmp_path: Path, read: Reader, jsonl: Jsonl, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = read(jsonl(ROWS))
    assert sorted(one.all) == WHOLE
    assert 5 < len(one.documents["validation"]) < 35
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet", row_group_size=13)
    monkeypatch.setattr(spans, "PIECE_BYTES", 200)
    many = read(jsonl(ROWS))
    assert many.num_pieces > 5
    assert many.documents == one.documents
    parquet = read(tmp_path / "rows.parquet")
    assert sorted(parquet.all) == WHOLE
    assert parquet.num_pieces > 2


def test_what_is_held_out_depends_on_the_row_alone(read: Reader, jsonl: Jsonl) -> None:
    path = jsonl(ROWS)
    before = read(path).documents
    with path.open("a") as stream:
        stream.write('{"text": "one more"}\n')
    after = read(path).documents
    assert set(before["train"]) <= set(after["train"])
    assert set(before["validation"]) <= set(after["validation"])


def test_few_rows_still_have_one_held_out(read: Reader, jsonl: Jsonl) -> None:
    found = read(jsonl(ROWS[:3]), fraction=1e-9)
    assert (len(found.documents["train"]), len(found.documents["validation"])) == (2, 1)
    with pytest.raises(ValueError, match="has one row, but one is held out"):
        read(jsonl(ROWS[:1]))


@pytest.mark.parametrize("max_bytes", range(200, 2000, 100))
def test_a_row_that_is_used_is_held_out_however_many_are_left_out(
    read: Reader, jsonl: Jsonl, max_bytes: int
) -> None:
    found = read(jsonl(ROWS), max_bytes=max_bytes, fraction=0.001)
    used = len(found.all)
    assert len(found.documents["validation"]) == (1 if used else 0)


def test_a_part_of_the_rows_may_be_used(read: Reader, jsonl: Jsonl) -> None:
    path = jsonl(ROWS)
    found = read(path, max_bytes=path.stat().st_size // 2)
    assert 15 < len(found.all) < 45
    assert found.left_out["rows beyond max_bytes"] == 60 - len(found.all)


def test_a_limit_holds_for_texts_beside_rows(tmp_path: Path, read: Reader, jsonl: Jsonl) -> None:
    jsonl([{"text": "r" * 90} for _ in range(40)])
    for index in range(40):
        (tmp_path / f"{index}.txt").write_text("t" * 100)
    found = read(tmp_path, extensions=(".txt", ".jsonl"), max_bytes=2000)
    texts = [each for each in found.all if each.startswith("t")]
    assert len(texts) == 9
    assert 5 < len(found.all) - len(texts) < 16


def test_what_is_left_out_is_counted(read: Reader, jsonl: Jsonl) -> None:
    path = jsonl([{"text": None}, {"text": ""}, *ROWS, {"text": "a\ud800b"}])
    path.write_text(path.read_text() + "\n\n")
    found = read(path)
    assert sorted(found.all) == sorted([*WHOLE, "a\ufffdb<|end|>"])
    assert found.left_out == {
        "rows without text": 2,
        "empty lines": 2,
        "halves of characters (U+FFFD took their place)": 1,
    }


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"txt": "a"}, r"rows\.jsonl, line 61: there is no field 'text'; did you mean 'txt'\?"),
        ({"text": 5}, r"line 61: field 'text' holds int 5, expected text"),
    ],
)
def test_a_bad_row_is_named(read: Reader, jsonl: Jsonl, row: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(jsonl([*ROWS, row]))


def test_a_long_text_is_one_document_in_pieces(
    tmp_path: Path, read: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spans, "PIECE_BYTES", 100)
    texts = {}
    for name in ("a", "b", "c"):
        texts[name] = "".join(f"{name} line {index}\n" for index in range(50))
        (tmp_path / f"{name}.txt").write_text(texts[name])
    found = read(*(tmp_path / f"{name}.txt" for name in texts))
    assert sorted(found.all) == sorted(f"{text}<|end|>" for text in texts.values())
    assert found.num_pieces > 10
    alone = read(tmp_path / "a.txt")
    assert len(alone.documents["train"]) == len(alone.documents["validation"]) == 1
    assert "".join(alone.all).replace("<|end|>", "") == texts["a"]


TALK = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yes"},
    {"role": "user", "content": "<|end|>?"},
    {"role": "assistant", "content": "No", "weight": 0},
]


def test_conversations_are_masked_and_end_as_the_template_ends(
    tmp_path: Path, read: Reader, jsonl: Jsonl, tokenizer: TextTokenizer
) -> None:
    rows = [{"messages": TALK[:2], "tools": None}, {"messages": TALK}, {"messages": []}]
    found = read(jsonl(rows * 4), kind="chat")
    ids = found.ids["train"] + found.ids["validation"]
    masks = found.trained["train"] + found.trained["validation"]
    assert len(ids) == 8
    for tokens, mask in zip(ids, masks, strict=True):
        trained = [token for token, flag in zip(tokens, mask, strict=True) if flag]
        assert tokenizer.decode(trained, skip_special_tokens=False) == "Yes<|end|>"
        assert tokens[-2] == 0 != tokens[-1]  # the template's line end, and no second end token
    assert found.left_out == {"conversations without messages": 4}
    # Parquet gives every message every key.
    pq.write_table(pa.Table.from_pylist(rows * 4), tmp_path / "talk.parquet")
    again = read(tmp_path / "talk.parquet", kind="chat")
    assert sorted(again.all) == sorted(found.all)


def test_halves_of_characters_in_conversations_are_replaced_and_counted(
    read: Reader, jsonl: Jsonl
) -> None:
    talk = [
        {"role": "user", "content": "é\ud800"},
        {"role": "assistant", "content": "\udc00 yes \U0001f600"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "description": "d\udfff"}}]
    rows = [{"messages": talk, "tools": tools}, *[{"messages": TALK[:2]}] * 9]
    found = read(jsonl(rows), kind="chat")
    (text,) = (each for each in found.all if "yes" in each)
    assert "[user]é\ufffd<|end|>" in text
    assert "[assistant]\ufffd yes \U0001f600<|end|>" in text
    assert '"d\ufffd"' in text
    assert found.left_out == {"halves of characters (U+FFFD took their place)": 3}


def test_a_template_that_refuses_is_named_with_its_row(read: Reader, jsonl: Jsonl) -> None:
    rows = [{"messages": TALK}, {"messages": [{"role": "user", "content": "a", "weight": 3}]}]
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 2, messages\[0\]: weight is 3"):
        read(jsonl(rows), kind="chat")


def test_pairs_are_read_and_checked(read: Reader, jsonl: Jsonl) -> None:
    pairs = [{"prompt": "q", "chosen": "a", "rejected": f"b{index}"} for index in range(9)]
    assert len(read(jsonl(pairs), kind="preference").all) == 18
    triples = [{"anchor": "q", "positive": "a", "negatives": ["b", "c"]}] * 9
    assert len(read(jsonl(triples), kind="embedding").all) == 36


def test_arrays_of_tokens_stay_as_they_are(
    tmp_path: Path, read: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(0)
    documents = [[rng.randint(1, 200) for _ in range(rng.randint(0, 40))] + [0] for _ in range(60)]
    line = np.array([token for document in documents for token in document], np.uint16)
    (tmp_path / "a.bin").write_bytes(line.tobytes())
    np.save(tmp_path / "a.npy", line)
    rows = "".join(json.dumps({"input_ids": document}) + "\n" for document in documents)
    (tmp_path / "a.jsonl").write_text(rows)
    for name in ("a.bin", "a.npy", "a.jsonl"):
        for size in (1 << 20, 64):
            monkeypatch.setattr(spans, "PIECE_BYTES", size)
            found = read(tmp_path / name, kind="tokens")
            assert sorted(found.ids["train"] + found.ids["validation"]) == sorted(documents), name
            assert 5 < len(found.ids["validation"]) < 35
            assert found.num_pieces == 1 or size == 64


def test_rows_of_a_matrix_are_documents_and_a_mask_stays(
    tmp_path: Path, read: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.numpy import save_file

    ids = np.arange(20 * 8, dtype=np.int64).reshape(20, 8)
    save_file({"input_ids": ids, "loss_mask": ids % 3}, tmp_path / "a.safetensors")
    monkeypatch.setattr(spans, "PIECE_BYTES", 100)
    found = read(tmp_path / "a.safetensors", kind="tokens")
    assert sorted(found.ids["train"] + found.ids["validation"]) == ids.tolist()
    for tokens, mask in zip(found.ids["train"], found.trained["train"], strict=True):
        assert mask == [int(token % 3 != 0) for token in tokens]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_rows_of_tokens_keep_their_mask(tmp_path: Path, read: Reader, name: str) -> None:
    ids = [list(range(8 * n, 8 * n + 5 + n % 3)) for n in range(20)]
    rows = [{"input_ids": each, "loss_mask": [i % 3 != 0 for i in each]} for each in ids]
    rows[7]["loss_mask"] = None  # type: ignore[assignment]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    found = read(tmp_path / name, kind="tokens")
    assert sorted(found.ids["train"] + found.ids["validation"]) == ids
    for tokens, mask in zip(found.ids["train"], found.trained["train"], strict=True):
        assert mask == [int(i % 3 != 0 or tokens == ids[7]) for i in tokens]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_labels_and_padding_of_tokens_mean_what_they_mean_in_transformers(
    tmp_path: Path, read: Reader, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [
        {
            "input_ids": [0, *range(n, n + 6), 0, 0],
            "labels": [-100, -100, *range(n + 1, n + 6), 0, -100],
            "attention_mask": [0, *[1] * 7, 0],
        }
        for n in range(20)
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    found = read(tmp_path / name, kind="tokens")
    for tokens, mask in zip(found.ids["train"], found.trained["train"], strict=True):
        assert tokens == [*range(tokens[0], tokens[0] + 6), 0]
        assert mask == [0, *[1] * 6]


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("labels", [2, 3, -100], "labels has 2 at 0, where the token is 1; expected the token"),
        ("labels", [1, 2], "labels is list .*expected a list of 3 numbers, the id, or -100"),
        ("labels", 1, "labels is int 1, expected a list of 3"),
        ("attention_mask", [1, 1, 1, 0], "attention_mask is list .*a list of 3 numbers, 0 or 1"),
    ],
)
def test_labels_that_do_not_fit_their_row_are_named(
    read: Reader, jsonl: Jsonl, name: str, given: object, message: str
) -> None:
    rows = [{"input_ids": [1, 2, 3]}, {"input_ids": [1, 2, 3], name: given}]
    with pytest.raises(ValueError, match=f"line 2: {message}"):
        read(jsonl(rows), kind="tokens")


@pytest.mark.parametrize("mask", [[1, 0], [1, 0.5, 1], "101", [[1], [0, 1], [1]]])
def test_a_mask_that_does_not_fit_its_row_is_named(
    read: Reader, jsonl: Jsonl, mask: object
) -> None:
    rows = [{"input_ids": [1, 2, 3]}, {"input_ids": [1, 2, 3], "loss_mask": mask}]
    with pytest.raises(ValueError, match=r"line 2: loss_mask is .*expected a list of 3 numbers"):
        read(jsonl(rows), kind="tokens")


def test_lists_in_a_row_of_tokens_are_named(read: Reader, jsonl: Jsonl) -> None:
    with pytest.raises(ValueError, match=r"line 2: field 'input_ids' is no list of token ids"):
        read(jsonl([{"input_ids": [1]}, {"input_ids": [[1], [2, 3]]}]), kind="tokens")


def test_a_line_of_tokens_without_ends_is_cut_near_its_end(
    tmp_path: Path, read: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spans, "PIECE_BYTES", 64)
    np.save(tmp_path / "a.npy", np.arange(1, 201))
    found = read(tmp_path / "a.npy", kind="tokens", fraction=0.1)
    assert found.ids == {"train": [list(range(1, 181))], "validation": [list(range(181, 201))]}


@pytest.mark.parametrize("content", [b"", b"\x00\xff" * 50], ids=["empty", "binary"])
def test_an_empty_or_binary_corpus_is_one_message(
    tmp_path: Path, read: Reader, content: bytes
) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(ValueError, match=r"sources\.s\.corpus.*(has no UTF-8 text|is an empty)"):
        read(tmp_path / "a.txt")
    (tmp_path / "a.jsonl").write_bytes(b"")
    with pytest.raises(ValueError, match="is an empty file; name another"):
        read(tmp_path / "a.jsonl", kind="chat")


def _word_begins() -> Iterator[Tokenizer]:
    """Tokenizers that put "▁" before a text: as Mixtral's does it, and as newer ones do."""
    letters = ["▁", *"line0123456789"]
    vocab = {token: i for i, token in enumerate(["<s>", *BYTES, *letters, "▁l", "▁0"])}
    for prepends in (True, False):
        made = Tokenizer(BPE(vocab, [("▁", "l"), ("▁", "0")], byte_fallback=True, fuse_unk=True))
        if prepends:
            made.normalizer = Sequence([Prepend("▁"), Replace(" ", "▁")])
        else:
            made.pre_tokenizer = Metaspace(prepend_scheme="first", split=False)
        yield made


@pytest.mark.parametrize(
    ("begins_words", "line"),
    [
        (None, "line {}\n"),  # its "\n\n" is one token, which a piece may begin in
        *product((0, 1), ("line {}\n", "{}\n\n", " line {}\r\n")),
    ],
)
def test_a_text_in_pieces_has_the_tokens_of_the_whole(
    tmp_path: Path,
    tokenizer: TextTokenizer,
    monkeypatch: pytest.MonkeyPatch,
    begins_words: int | None,
    line: str,
) -> None:
    parsed = Tokenizer.from_buffer(tokenizer.files["tokenizer.json"])
    if begins_words is not None:
        parsed = list(_word_begins())[begins_words]
    parsed.add_special_tokens(["<s>"])
    begin = parsed.token_to_id("<s>")
    parsed.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    files = {**tokenizer.files, "tokenizer.json": parsed.to_str().encode()}
    ends = EndTokens(document_end_id=0, eos_token_ids=(0,), pad_token_id=0)
    path = tmp_path / "a.txt"
    path.write_bytes("".join(line.format(index) for index in range(99)).encode())
    size = path.stat().st_size
    file = DataFile(name="a", path=path, shown="a", format="text", size_bytes=size)
    job = EncodeJob(kind="text", field="text", dtype="", hold_below=0, keep_below=None)
    monkeypatch.setattr(spans, "PIECE_BYTES", 100)
    cut = spans.cut_text(file, "train")
    assert len(cut) > 3
    part = encode_piece(cut, job, TextTokenizer(files, ends)).parts["train"]
    whole = TextTokenizer(files, ends).encode_batch([path.read_bytes().decode()])[0]
    assert part.tokens.tolist() == [*whole.tolist(), 0]
    assert part.tokens.tolist().count(begin) == 1
    assert part.begins.tolist() == [0]
