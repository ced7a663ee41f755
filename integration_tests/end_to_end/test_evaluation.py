"""Figures of `moe-train eval` against transformers' losses on the same windows and choices."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoTokenizer, PreTrainedModel

from moe_train.generation import ModelOptions
from moe_train.inference import EvaluateJob, evaluate
from ranktest.fixtures import one_thread as one_thread

SaveFamily = Callable[..., PreTrainedModel]
CPU = ModelOptions(device="cpu")


def log_likelihood(model: PreTrainedModel, ids: list[int], start: int) -> float:
    """Of the tokens from `start` on, by transformers."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].float()
    return -float(
        F.cross_entropy(logits[start - 1 : -1], torch.tensor(ids[start:]), reduction="sum")
    )


@pytest.mark.parametrize("case", ["deepseek_v3", "gpt_oss"])
def test_perplexity_is_transformers_loss_over_the_same_windows(
    case: str, save_family: SaveFamily, tmp_path: Path
) -> None:
    model = save_family(case, tmp_path / "model")
    texts = ["def self return é " * 9, "hello", "import value\n" * 30]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    job = EvaluateJob(
        checkpoint=str(tmp_path / "model"),
        data=(str(tmp_path / "a.jsonl"),),
        sequence_length=24,
        model=CPU,
    )
    figures = evaluate(job)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "model")
    nats, tokens = 0.0, 0
    for text in texts:
        ids = [*theirs(text).input_ids, 0]
        for first in range(0, len(ids) - 1, 24):
            window = ids[first : first + 25]
            nats -= log_likelihood(model, window, 1)
            tokens += len(window) - 1
    assert figures is not None and figures["tokens"] == tokens
    assert figures["nats_per_token"] == pytest.approx(nats / tokens, rel=1e-6)


def test_of_conversations_the_assistants_tokens_count(
    save_family: SaveFamily, tmp_path: Path
) -> None:
    model = save_family("qwen3_moe", tmp_path / "model")
    talks: list[Any] = [
        [{"role": "user", "content": "def?"}, {"role": "assistant", "content": "self é"}],
        [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "hello", "weight": 0},
            {"role": "user", "content": "for"},
            {"role": "assistant", "content": "in None"},
        ],
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"messages": t}) + "\n" for t in talks))
    figures = evaluate(
        EvaluateJob(
            checkpoint=str(tmp_path / "model"),
            data=(str(tmp_path / "a.jsonl"),),
            kind="chat",
            model=CPU,
        )
    )
    theirs = AutoTokenizer.from_pretrained(tmp_path / "model")
    nats, tokens = 0.0, 0
    for before, answer in (
        ("<|user|>def?<|endoftext|><|assistant|>", "self é<|endoftext|>"),
        (
            "<|user|>x<|endoftext|><|assistant|>hello<|endoftext|><|user|>for<|endoftext|>"
            "<|assistant|>",
            "in None<|endoftext|>",
        ),
    ):
        start, ids = len(theirs(before).input_ids), theirs(before + answer).input_ids
        nats -= log_likelihood(model, ids, start)
        tokens += len(ids) - start
    assert figures is not None and figures["tokens"] == tokens
    assert figures["nats_per_token"] == pytest.approx(nats / tokens, rel=1e-6)


def test_choices_are_compared_as_by_brute_force(save_family: SaveFamily, tmp_path: Path) -> None:
    model = save_family("mixtral", tmp_path / "model")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "model")
    words = ["def self", "hello", "é é é", "import value", "x"]
    records = [
        {"question": words[n % 5], "choices": [words[(n + k + 1) % 5] for k in range(3)]}
        for n in range(7)
    ]
    hits = dict.fromkeys(("accuracy", "accuracy_per_token", "accuracy_per_byte"), 0)
    for number, record in enumerate(records):
        record["answer"] = number % 3  # type: ignore[assignment]
        prompt = theirs(record["question"]).input_ids
        scores = []
        for choice in record["choices"]:
            whole = theirs(f"{record['question']} {choice}").input_ids
            assert whole[: len(prompt)] == prompt
            value = log_likelihood(model, whole, len(prompt))
            tokens = len(whole) - len(prompt)
            scores.append((value, value / tokens, value / len(choice.encode())))
        for column, name in enumerate(hits):
            best = max(range(3), key=lambda n: scores[n][column])
            hits[name] += best == number % 3
    path = tmp_path / "q.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    job = EvaluateJob(
        checkpoint=str(tmp_path / "model"), data=(str(path),), kind="multiple_choice", model=CPU
    )
    figures = evaluate(job)
    assert figures is not None
    for name, count in hits.items():
        share = count / 7
        assert figures[name] == pytest.approx(share)
        assert figures[f"{name}_stderr"] == pytest.approx((share * (1 - share) / 6) ** 0.5)
