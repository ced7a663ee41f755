"""Text of a checkpoint of two steps, against the plain way without a cache."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from moe_train.jobs.generate import generate_text, load_model, pick
from moe_train.layout import stage_tensors
from unified_ckpt import CheckpointError, read_index


@pytest.fixture
def checkpoint(trained_run: Path) -> Path:
    return trained_run / "checkpoint-2"


def generate(checkpoint: Path, prompt: str = "def self", **changes: Any) -> str:
    asked: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0, "top_k": 0, "seed": 0}
    return generate_text(checkpoint, prompt, **{**asked, **changes})


def test_greedy_text_takes_the_most_probable_token_of_the_whole_sequence(
    checkpoint: Path,
) -> None:
    stage = load_model(checkpoint)
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    tokens = tokenizer.encode("def self").ids
    with torch.no_grad():
        for _ in range(12):
            positions = torch.arange(len(tokens))[None]
            hidden, _ = stage.hidden_states(torch.tensor([tokens]), positions)
            token = int(stage.logits(hidden)[0, -1].argmax())
            if token == 0:
                break
            tokens.append(token)
    assert generate(checkpoint) == tokenizer.decode(tokens)
    assert len(generate(checkpoint)) > len("def self")


def test_every_tensor_of_the_checkpoint_is_in_the_decoder(checkpoint: Path) -> None:
    stage = load_model(checkpoint)
    assert not stage.training
    held = sum(tensor.numel() for tensor in stage_tensors(stage).values())
    stored = [torch.Size(entry.shape or ()).numel() for entry in read_index(checkpoint).values()]
    assert held == sum(stored)


def test_text_depends_on_the_seed_alone(checkpoint: Path) -> None:
    texts = [generate(checkpoint, temperature=2.0, seed=seed) for seed in (1, 2, 1)]
    assert texts[0] == texts[2] != texts[1]


def test_an_empty_prompt_begins_with_the_token_between_documents(checkpoint: Path) -> None:
    assert generate(checkpoint, "") == generate(checkpoint, "")


def test_text_ends_where_the_models_positions_end(checkpoint: Path) -> None:
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    room = 64 - len(tokenizer.encode("def self").ids)
    all_, less = (generate(checkpoint, max_new_tokens=n) for n in (room, room - 1))
    assert generate(checkpoint, max_new_tokens=500) == all_ != less
    assert all_.startswith(less)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0, "),
        ({"temperature": -1.0}, "temperature=-1.0, "),
        ({"top_k": -1}, "top_k=-1; expected at least 1, at least 0 and at least 0"),
        ({"prompt": "def " * 64}, "tokens; the model takes fewer than 64"),
    ],
)
def test_what_is_out_of_range_is_refused(
    checkpoint: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        generate(checkpoint, **changes)


def test_a_folder_that_is_no_checkpoint_is_refused_by_name(
    checkpoint: Path, tmp_path: Path
) -> None:
    message = f"{tmp_path} holds no tokenizer.json; name a checkpoint-N folder"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        generate(tmp_path)
    with pytest.raises(ValueError, match=r"nowhere is not a folder; name a checkpoint-N folder$"):
        load_model(tmp_path / "nowhere")
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    (copy / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        generate(copy)


def test_temperature_0_and_a_top_k_of_1_take_the_most_probable_token() -> None:
    logits = torch.tensor([0.0, 3.0, 2.9, -1.0])
    generator = torch.Generator().manual_seed(0)
    assert {pick(logits, 0, 0, generator) for _ in range(20)} == {1}
    assert {pick(logits, 5.0, 1, generator) for _ in range(20)} == {1}


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, 0), (2.0, 0), (0.5, 2), (1.0, 9)])
def test_tokens_are_drawn_with_the_probabilities_of_the_softmax(
    temperature: float, top_k: int
) -> None:
    logits = torch.tensor([0.5, 2.0, 1.0, -3.0])
    expected = (logits.double() / temperature).softmax(0)
    if top_k == 2:
        expected = torch.tensor([0.0, expected[1], expected[2], 0.0])
        expected /= expected.sum()
    generator = torch.Generator().manual_seed(0)
    drawn = [pick(logits, temperature, top_k, generator) for _ in range(4000)]
    shares = torch.bincount(torch.tensor(drawn), minlength=4) / 4000
    # Four standard deviations of a share of 4000 draws are at most 0.032.
    torch.testing.assert_close(shares.double(), expected.double(), rtol=0, atol=0.032)
    assert bool((shares[expected == 0] == 0).all())
