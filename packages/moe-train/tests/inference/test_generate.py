"""Text of a checkpoint of two steps, from Python and by the command's job."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moe_train.generation import GenerationOptions, ModelOptions, TextGenerator
from moe_train.inference.generate import GenerateJob, generate, generate_text, read_prompts

CPU = ModelOptions(device="cpu")
SHORT = GenerationOptions(max_new_tokens=6)


@pytest.fixture
def checkpoint(trained_run: Path) -> Path:
    return trained_run / "checkpoint-2"


def text_of(checkpoint: Path, prompt: str = "def self", **changes: Any) -> str:
    return generate_text(checkpoint, prompt, **{"max_new_tokens": 12, **changes})


def test_the_answer_is_the_prompt_and_its_continuation(checkpoint: Path) -> None:
    (completion,) = TextGenerator.open(checkpoint).generate(
        ["def self"], GenerationOptions(max_new_tokens=12)
    )
    assert text_of(checkpoint) == "def self" + completion.text


def test_text_depends_on_the_seed_alone(checkpoint: Path) -> None:
    texts = [text_of(checkpoint, temperature=2.0, seed=seed) for seed in (1, 2, 1)]
    assert texts[0] == texts[2] != texts[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0; expected"),
        ({"temperature": -1.0}, "temperature=-1.0; expected 0, the most"),
        ({"top_k": -1}, "top_k=-1; expected a whole number of at least 0"),
        ({"prompt": "def " * 64}, "tokens; the model takes at least 1 and fewer than 64"),
    ],
)
def test_what_is_out_of_range_is_refused(
    checkpoint: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        text_of(checkpoint, **changes)


def test_a_folder_that_is_no_checkpoint_or_damaged_is_a_value_error_with_its_name(
    checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=re.escape(str(tmp_path))):
        text_of(tmp_path)
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    (copy / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(ValueError, match=r"copy cannot be loaded: .*model\.safetensors"):
        text_of(copy)


def test_a_file_of_prompts_becomes_a_file_of_answers_in_its_order(
    checkpoint: Path, tmp_path: Path
) -> None:
    prompts = [{"prompt": "def", "id": 7}, {"prompt": "é None"}, {"prompt": "x"}]
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n\n".join(json.dumps(prompt) for prompt in prompts) + "\n")
    job = GenerateJob(
        checkpoint=str(checkpoint),
        prompts_file=str(source),
        output=str(out),
        batch_size=2,
        model=CPU,
        options=SHORT,
    )
    assert generate(job) is None
    lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    expected = TextGenerator.open(checkpoint).generate([p["prompt"] for p in prompts], SHORT)
    for line, prompt, completion in zip(lines, prompts, expected, strict=True):
        assert line == {
            **prompt,
            "completion": completion.text,
            "finish_reason": completion.finish_reason,
            "num_tokens": len(completion.token_ids),
        }


def test_one_prompt_is_shown_with_its_text_as_it_comes(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = {"prompt": "def self"}
    generate(GenerateJob(checkpoint=str(checkpoint), record=record, model=CPU, options=SHORT))
    assert capsys.readouterr().out == text_of(checkpoint, max_new_tokens=6) + "\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: list; expected a JSON object"),
        ('{"text": "a"}', "line 2: expected an object with the text `prompt` or the list"),
        ('{"prompt": 3}', "line 2: expected an object with the text `prompt` or the list"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "line 2: "),
        (json.dumps({"prompt": "a " * 200}), "line 2 has "),
    ],
)
def test_a_record_that_cannot_be_used_is_named_by_file_and_line(
    checkpoint: Path, tmp_path: Path, line: str, message: str
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a"}\n' + line + "\n")
    job = GenerateJob(checkpoint=str(checkpoint), prompts_file=str(source), output="-", model=CPU)
    with pytest.raises(ValueError, match=f"in.jsonl, {re.escape(message)}"):
        generate(job)
    assert read_prompts(GenerateJob(checkpoint="x", record={"prompt": "a"}))[0] == ["the prompt"]


def test_a_batch_of_no_rows_is_refused(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="batch_size=0; expected at least 1"):
        generate(GenerateJob(checkpoint=str(checkpoint), record={"prompt": "a"}, batch_size=0))


def test_halves_of_characters_in_prompts_are_replaced(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    (copy / "chat_template.jinja").write_text("{{ messages[0].content }}")
    file, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    messages = [{"role": "user", "content": "\udfff"}]
    lines = [json.dumps({"prompt": "def \ud800 é"}), json.dumps({"messages": messages})]
    file.write_text("\n".join(lines))
    job = GenerateJob(checkpoint=str(copy), prompts_file=str(file), model=CPU, options=SHORT)
    assert generate(replace(job, output=str(output))) is None
    first, second = map(json.loads, output.read_text(encoding="utf-8").splitlines())
    assert first["prompt"] == "def \ufffd é"
    assert second["messages"][0]["content"] == "\ufffd"
    assert first["completion"] == text_of(copy, "def \ufffd é", max_new_tokens=6)[7:]
    assert generate(replace(job, prompts_file=None, record={"prompt": "def \udcff"})) is None
    assert capsys.readouterr().out.startswith("def \ufffd")
