"""Ids, texts and end tokens against transformers' AutoTokenizer and GenerationConfig."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from moe_train.tokenization import TextTokenizer, load_tokenizer

transformers = pytest.importorskip("transformers")

TEXTS = [
    "",
    " ",
    "Hallo, wie geht's?\n\n  café ☕ 漢",
    "a <|im_end|>  b</s> <tool_call>x",
    "\tdef f",
]
SAMPLE = ["def f(x):\n    return x + 1\n", "Hallo, wie geht es dir? Gut, danke.\n"] * 5
CONTROL = ["<s>", "</s>", "<|im_end|>", "<｜end▁of▁sentence｜>"]


def byte_level() -> Tokenizer:
    made = Tokenizer(BPE())
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=300, special_tokens=CONTROL, initial_alphabet=alphabet)
    made.train_from_iterator(SAMPLE, trainer)
    made.add_tokens([AddedToken("<tool_call>", lstrip=True), AddedToken("café", normalized=True)])
    return made


def byte_fallback() -> Tokenizer:
    made = Tokenizer(BPE(byte_fallback=True, unk_token="<unk>"))
    spaces = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    made.normalizer = normalizers.Sequence(spaces)
    back = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)])
    known = ["<unk>", *CONTROL, *(f"<0x{byte:02X}>" for byte in range(256))]
    made.train_from_iterator(SAMPLE, BpeTrainer(vocab_size=400, special_tokens=known))
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", made.token_to_id("<s>"))]
    )
    values = json.loads(made.to_str())
    values["added_tokens"] = [t for t in values["added_tokens"] if t["content"][:3] != "<0x"]
    return Tokenizer.from_str(json.dumps(values))


Both = tuple[TextTokenizer, Any]


@pytest.fixture(params=[byte_level, byte_fallback])
def both(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Both]:
    """`both(eos_token="</s>")`: our tokenizer of a folder, and transformers'."""

    def make(**names: str) -> Both:
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=request.param(), **names)
        fast.save_pretrained(tmp_path)
        return load_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)

    return make


def test_ids_and_texts_are_those_of_transformers(both: Callable[..., Both]) -> None:
    ours, theirs = both(eos_token="</s>", pad_token="<|new pad|>", bos_token="<s>")
    assert ours.vocab_size == len(theirs)
    assert (ours.document_end_id, ours.pad_token_id) == (theirs.eos_token_id, theirs.pad_token_id)
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert ours.encode_prompt(text) == ids
        for skip in (False, True):
            expected = theirs.decode(ids, skip_special_tokens=skip)
            assert ours.decode(ids, skip_special_tokens=skip) == expected


def test_documents_begin_as_in_transformers_and_hold_no_special_token(
    both: Callable[..., Both],
) -> None:
    ours, theirs = both(eos_token="</s>")
    begin = theirs("")["input_ids"]
    for text, ids in zip(TEXTS, ours.encode_batch(TEXTS), strict=True):
        assert ids[: len(begin)].tolist() == begin
        body = theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        if "<" not in text:
            assert ids[len(begin) :].tolist() == body
        assert not {*ids[len(begin) :].tolist()} & {*theirs.all_special_ids}


@pytest.mark.parametrize("end", CONTROL[1:])
def test_any_end_token_of_the_files_ends_a_text(
    both: Callable[..., Both], end: str, tmp_path: Path
) -> None:
    _, theirs = both(eos_token=end)
    other = theirs.convert_tokens_to_ids("</s>")
    transformers.GenerationConfig(eos_token_id=[other, theirs.eos_token_id]).save_pretrained(
        tmp_path
    )
    ours = load_tokenizer(tmp_path)
    generation = transformers.GenerationConfig.from_pretrained(tmp_path)
    assert ours.document_end_id == theirs.eos_token_id
    assert {*ours.eos_token_ids} == {*generation.eos_token_id}
    assert (
        ours.files["generation_config.json"] == (tmp_path / "generation_config.json").read_bytes()
    )
    assert ours.decode([*ours.eos_token_ids]) == ""


def test_files_of_older_versions_are_read_as_transformers_reads_them(
    both: Callable[..., Both], tmp_path: Path
) -> None:
    both(eos_token="</s>")
    path = tmp_path / "tokenizer_config.json"
    values = json.loads(path.read_text())
    for key in ("eos_token", "added_tokens_decoder"):
        values.pop(key, None)
    path.write_text(json.dumps(values))
    roles = {"eos_token": {"content": "<|im_end|>", "lstrip": False, "rstrip": False}}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({**roles, "pad_token": "</s>"}))
    ours, theirs = load_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert ours.document_end_id == theirs.eos_token_id
    assert ours.pad_token_id == theirs.pad_token_id


@pytest.mark.parametrize(
    ("class_name", "kind"),
    [
        ("Qwen2Tokenizer", byte_level),
        ("GPT2Tokenizer", byte_level),
        ("GPTNeoXTokenizer", byte_level),
        ("LlamaTokenizer", byte_fallback),
    ],
)
def test_classes_that_build_their_tokenizer_in_code_say_the_same(
    tmp_path: Path, class_name: str, kind: Callable[[], Tokenizer]
) -> None:
    model = json.loads(kind().to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    made = getattr(transformers, class_name)(vocab=model["vocab"], merges=merges)
    made.save_pretrained(tmp_path)
    ours, theirs = load_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert type(theirs).__name__ == class_name
    for text in (*TEXTS, *SAMPLE):
        ids = theirs(text).input_ids
        assert ours.encode_prompt(text) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
