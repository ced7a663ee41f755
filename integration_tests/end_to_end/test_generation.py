"""Generation against transformers: batches, stop, sampling, chat, on one process and several."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from moe_train.cli import main
from moe_train.generation import GenerationOptions, TextGenerator
from moe_train.generation.sampling import processed_logits
from ranktest.fixtures import one_thread as one_thread

PROMPTS = ["def self", "hello wörld for in None", "x", "é é"]
SaveFamily = Callable[..., PreTrainedModel]
END = 7
"""A token that ends a text as soon as it comes, which it does in some of the texts."""


@pytest.mark.parametrize("case", ["deepseek_v3", "gpt_oss", "mixtral"])
def test_greedy_tokens_of_a_batch_are_those_of_transformers(
    case: str, save_family: SaveFamily, tmp_path: Path
) -> None:
    model = save_family(case, tmp_path, END)
    generator = TextGenerator.open(tmp_path)
    found = generator.generate(PROMPTS, GenerationOptions(max_new_tokens=64))
    reasons = set()
    for prompt, completion in zip(PROMPTS, found, strict=True):
        ids = torch.tensor([generator.tokenizer.encode_prompt(prompt)])
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, max_new_tokens=64, do_sample=False)
        assert list(completion.token_ids) == out[0, ids.shape[1] :].tolist()
        reasons.add(completion.finish_reason)
    assert "length" in reasons or "end" in reasons


def test_the_logits_that_are_drawn_from_are_those_of_transformers() -> None:
    generator = torch.Generator().manual_seed(0)
    for number in range(60):
        draw = torch.rand(6, generator=generator).tolist()
        options = GenerationOptions(
            temperature=0.2 + 2 * draw[0],
            top_k=int(draw[1] * 30) if number % 2 else 0,
            top_p=0.3 + 0.7 * draw[2] if number % 3 else 1.0,
            min_p=0.3 * draw[3] if number % 5 else 0.0,
            repetition_penalty=0.5 + draw[4],
        )
        logits = 3 * torch.randn(1, 40, generator=generator)
        ids = torch.randint(0, 40, (1, 9), generator=generator)
        expected = RepetitionPenaltyLogitsProcessor(options.repetition_penalty)(ids, logits)
        expected = TemperatureLogitsWarper(options.temperature)(ids, expected)
        if options.top_k:
            expected = TopKLogitsWarper(options.top_k)(ids, expected)
        if options.top_p < 1:
            expected = TopPLogitsWarper(options.top_p)(ids, expected)
        if options.min_p:
            expected = MinPLogitsWarper(options.min_p)(ids, expected)
        assert torch.equal(processed_logits(logits[0], ids[0].tolist(), options), expected[0])


def test_an_answer_follows_the_prompt_of_the_template(
    save_family: SaveFamily, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_family("qwen3_moe", tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "system", "content": "Be é."}, {"role": "user", "content": "def?"}]
    ids = theirs.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
    ids = ids if isinstance(ids, torch.Tensor) else ids["input_ids"]
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False
    )
    expected = theirs.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    argv = ["chat", str(tmp_path), "--system", "Be é.", "--message", "def?"]
    assert main([*argv, "--max-new-tokens", "9", "--device", "cpu"]) == 0
    assert capsys.readouterr().out == expected + "\n"


@pytest.mark.parametrize("layout", [["--ep", "2"]])
def test_the_command_writes_the_same_on_several_processes(
    layout: list[str], save_family: SaveFamily, tmp_path: Path
) -> None:
    model_folder = tmp_path / "model"
    save_family("deepseek_v3", model_folder)
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in PROMPTS))
    argv: list[Any] = ["generate", "--checkpoint", model_folder, "--prompts", tmp_path / "in.jsonl"]
    argv += ["--max-new-tokens", 12, "--temperature", 1.1, "--seed", 4, "--device", "cpu"]
    texts = []
    for name, more in (("one", []), ("several", layout)):
        out = tmp_path / f"{name}.jsonl"
        assert main([*map(str, argv), "--output", str(out), *more]) == 0
        texts.append(out.read_text(encoding="utf-8"))
    assert texts[0] == texts[1]
