"""Prompts, ids and masks of conversations against transformers' `apply_chat_template`.

Tokenizers of three kinds, and templates as published models have them.
"""

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
    "What is the weather like today? It is sunny, 21 degrees; no rain at all.\n" * 4,
    "def f(x):\n    return x + 1\n\nSay hello to the user, assistant. Tool system [INST] café ☕\n"
    * 4,
]
CONTROL = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "[INST]", "[/INST]"),
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
    *("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>"),
]


def byte_level() -> Tokenizer:
    """As Qwen, OLMoE, GLM and GPT-OSS have."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = BpeTrainer(
        vocab_size=400, special_tokens=CONTROL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens([AddedToken("<tool_call>"), AddedToken("</tool_call>")])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As Mixtral and ERNIE have: words begin with a metaspace, unknown characters become bytes."""
    tokenizer = Tokenizer(BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    spaces = decoders.Replace("▁", " ")
    tokenizer.decoder = decoders.Sequence(
        [spaces, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    known = ["<unk>", *CONTROL, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = BpeTrainer(vocab_size=500, special_tokens=known)
    tokenizer.train_from_iterator(TEXTS, trainer)
    begin = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", begin)]
    )
    # Bytes are ordinary tokens; they were special only to have them in the vocabulary.
    values = json.loads(tokenizer.to_str())
    values["added_tokens"] = [t for t in values["added_tokens"] if t["content"][:3] != "<0x"]
    return Tokenizer.from_str(json.dumps(values))


def flagged() -> Tokenizer:
    """Added tokens that take the white space around them, and one that is normalised first."""
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens(
        [
            AddedToken("<|im_end|>", lstrip=True, rstrip=True, special=True, normalized=False),
            AddedToken("<|eot_id|>", rstrip=True, special=True, normalized=False),
        ]
    )
    tokenizer.add_tokens([AddedToken("degrees", normalized=True, single_word=True)])
    return tokenizer


TOKENIZERS = {"byte level": byte_level, "byte fallback": byte_fallback, "flagged": flagged}


# Name of a template's file: its begin and end tokens.
TEMPLATES = {
    "chatml": ("<|endoftext|>", "<|im_end|>"),
    "llama3": ("<|begin_of_text|>", "<|eot_id|>"),
    "mistral": ("<s>", "</s>"),
    "deepseek": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    "gpt_oss": ("<|endoftext|>", "<|return|>"),
    "marked": ("<|endoftext|>", "<|im_end|>"),
}


def text_of(template: str) -> str:
    """The text of a template."""
    path = Path(__file__).parent / "chat_templates" / f"{template}.jinja"
    return path.read_text(encoding="utf-8")


def turn(role: str, content: str | None, **more: Any) -> dict[str, Any]:
    """One message."""
    return {"role": role, "content": content, **more}


SIMPLE = [turn("user", "What is the weather like? ☕ <b>"), turn("assistant", "It is sunny.")]
SEVERAL = [
    turn("system", "Say hello to the user."),
    *SIMPLE,
    turn("user", "  And café?\n"),
    turn("assistant", ""),
    turn("user", "x + 1"),
    turn("assistant", "return x + 1\n\nno rain", weight=1),
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "<of> a 'town'", "parameters": {"é": None}},
    }
]
CALLS = [
    turn("user", "weather?"),
    turn(
        "assistant",
        None,
        tool_calls=[{"type": "function", "function": {"name": "weather", "arguments": {"a": "é"}}}],
    ),
    turn("tool", "21 degrees"),
    turn("tool", "sunny"),
    turn("assistant", "21 degrees, sunny", reasoning_content="so it is"),
]


def save(folder: Path, tokenizer: Tokenizer, template: str, begin: str, end: str) -> Any:
    """Write the tokenizer as transformers does; returns transformers' tokenizer."""
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=begin, eos_token=end
    )
    fast.chat_template = template
    fast.save_pretrained(folder)
    return transformers.AutoTokenizer.from_pretrained(folder)


Both = tuple[TextTokenizer, Any]


@pytest.fixture
def both(tmp_path: Path) -> Callable[..., Both]:
    """`both(tokenizer="byte level", template="chatml")`: ours and transformers'."""

    def make(tokenizer: str = "byte level", template: str = "chatml") -> Both:
        theirs = save(tmp_path, TOKENIZERS[tokenizer](), text_of(template), *TEMPLATES[template])
        return load_tokenizer(tmp_path), theirs

    return make


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_prompts_and_ids_are_those_of_transformers(
    both: Callable[..., Both], tokenizer: str, template: str
) -> None:
    ours, theirs = both(tokenizer, template)
    for messages in (SIMPLE, SEVERAL):
        for prompt in (False, True):
            expected = theirs.apply_chat_template(
                messages, add_generation_prompt=prompt, tokenize=False
            )
            assert ours.render_chat(messages, add_generation_prompt=prompt) == expected
        told = theirs.apply_chat_template(messages, return_dict=True)
        found = ours.encode_chat(messages)
        assert found.ids.tolist() == told["input_ids"]
        assert found.trained.any()


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_marked_turns_are_those_of_transformers(both: Callable[..., Both], tokenizer: str) -> None:
    ours, theirs = both(tokenizer, "marked")
    for messages in (SIMPLE, SEVERAL):
        told = theirs.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True
        )
        assert ours.encode_chat(messages).trained.tolist() == list(
            map(bool, told["assistant_masks"])
        )


def trained_texts(ours: TextTokenizer, messages: list[dict[str, Any]], **more: Any) -> list[str]:
    """Each trained run of tokens as text."""
    found = ours.encode_chat(messages, **more)
    texts: list[list[int]] = []
    previous = False
    for token, trained in zip(found.ids.tolist(), found.trained.tolist(), strict=True):
        if trained:
            texts = texts if previous else [*texts, []]
            texts[-1].append(token)
        previous = trained
    return [ours.decode(ids, skip_special_tokens=False) for ids in texts]


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("template", [name for name in TEMPLATES if name != "marked"])
def test_trained_are_what_the_assistant_says_and_the_end_of_its_turn(
    both: Callable[..., Both], tokenizer: str, template: str
) -> None:
    ours, _ = both(tokenizer, template)
    end = TEMPLATES[template][1]
    texts = trained_texts(ours, SEVERAL)
    head = "<|channel|>final<|message|>" if template == "gpt_oss" else ""
    ends = ["<|end|>", "<|end|>", "<|return|>"] if template == "gpt_oss" else [end] * 3
    said = ["It is sunny.", "", "return x + 1\n\nno rain"]
    expected = [head + text + mark for text, mark in zip(said, ends, strict=True)]
    blank = str.maketrans("", "", " \n▁")
    assert [t.translate(blank) for t in texts] == [t.translate(blank) for t in expected]


def test_the_prompt_of_a_turn_is_what_stands_before_it(both: Callable[..., Both]) -> None:
    for template in TEMPLATES:
        ours, theirs = both("byte level", template)
        found = ours.encode_chat(SEVERAL)
        for number in (n for n, message in enumerate(SEVERAL) if message["role"] == "assistant"):
            prompt = theirs.apply_chat_template(
                SEVERAL[:number], add_generation_prompt=True, return_dict=True
            )["input_ids"]
            assert found.ids[: len(prompt)].tolist() == prompt
            assert found.trained[len(prompt)] and not found.trained[len(prompt) - 1]


def test_weights_of_0_and_tool_calls_are_honoured(both: Callable[..., Both]) -> None:
    ours, theirs = both()
    told = theirs.apply_chat_template(CALLS, tools=TOOLS, return_dict=True)
    assert ours.encode_chat(CALLS, tools=TOOLS).ids.tolist() == told["input_ids"]
    call = '\n<tool_call>\n{"name": "weather", "arguments": {"a": "é"}}\n</tool_call><|im_end|>'
    answer = "<think>\nso it is\n</think>\n\n21 degrees, sunny<|im_end|>"
    assert trained_texts(ours, CALLS, tools=TOOLS) == [call, answer]
    light = [{**CALLS[1], "weight": 0}]
    assert trained_texts(ours, [CALLS[0], *light, *CALLS[2:]], tools=TOOLS) == [answer]
    for template in ("marked", "gpt_oss"):
        ours, _ = both("byte level", template)
        messages = [*SIMPLE, turn("user", "x"), {**SIMPLE[1], "weight": 0}]
        assert len(trained_texts(ours, messages)) == 1


def test_reasoning_that_a_template_drops_from_earlier_turns_does_not_move_a_turn(
    both: Callable[..., Both],
) -> None:
    ours, _ = both()
    messages = [
        turn("user", "1"),
        turn("assistant", "one", reasoning_content="r1"),
        turn("user", "2"),
        turn("assistant", "two", thinking="r2"),
    ]
    expected = ["one<|im_end|>", "<think>\nr2\n</think>\n\ntwo<|im_end|>"]
    assert trained_texts(ours, messages) == expected


def test_refusals_name_the_message_and_a_remedy(both: Callable[..., Both], tmp_path: Path) -> None:
    ours, theirs = both("byte level", "mistral")
    with pytest.raises(ValueError, match="roles must alternate"):
        ours.encode_chat([SIMPLE[0], SIMPLE[0]])
    with pytest.raises(ValueError, match=r"message 1: no prompt can be made.*tokenizer\.chat_t"):
        save(tmp_path, TOKENIZERS["byte level"](), "{{ messages[0].content + 'x' }}", "<s>", "</s>")
        load_tokenizer(tmp_path).encode_chat([SIMPLE[1]])
    with pytest.raises(ValueError, match="message 2: the chat template writes another text"):
        save(
            tmp_path,
            TOKENIZERS["byte level"](),
            "{{ messages | length }}{{ messages[-1].content }}",
            "<s>",
            "</s>",
        )
        load_tokenizer(tmp_path).encode_chat(SIMPLE)
    with pytest.raises(ValueError, match=r"message 2 has weight=0\.5"):
        ours.encode_chat([SIMPLE[0], {**SIMPLE[1], "weight": 0.5}])
    theirs.chat_template = None
    theirs.save_pretrained(tmp_path / "none")
    with pytest.raises(ValueError, match=r"no chat template; set tokenizer\.chat_template"):
        load_tokenizer(tmp_path / "none").encode_chat(SIMPLE)


def test_templates_by_name_are_read_from_every_place(tmp_path: Path) -> None:
    theirs = save(tmp_path, TOKENIZERS["byte level"](), text_of("marked"), "<s>", "</s>")
    theirs.chat_template = {
        "default": text_of("marked"),
        "tool_use": "{{ tools[0] | tojson(indent=1) }}",
    }
    theirs.save_pretrained(tmp_path / "files")
    old = tmp_path / "old"
    theirs.save_pretrained(old, save_jinja_files=False)
    assert isinstance(
        json.loads((old / "tokenizer_config.json").read_text())["chat_template"], list
    )
    for folder in (tmp_path / "files", old):
        ours = load_tokenizer(folder)
        carried = tmp_path / f"{folder.name}-carried"
        carried.mkdir()
        for name, content in ours.files.items():
            (carried / name).write_bytes(content)
        again = type(theirs).from_pretrained(carried)
        for tools in (None, TOOLS):
            expected = theirs.apply_chat_template(SIMPLE, tools=tools, tokenize=False)
            assert ours.render_chat(SIMPLE, tools=tools) == expected
            assert again.apply_chat_template(SIMPLE, tools=tools, tokenize=False) == expected
