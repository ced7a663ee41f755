"""What is loaded: a whole checkpoint, or a part on each of several ranks, and nothing damaged."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_train.config import ParallelConfig
from moe_train.generation import (
    GenerationOptions,
    ModelOptions,
    TextGenerator,
    check_model,
    generate_all,
    load_model,
    open_model,
)
from moe_train.layout import stage_tensors
from moe_train.parallel import join
from ranktest import run_ranks
from unified_ckpt import read_index

PROMPTS = [[5, 6, 7, 8, 9], [10], [11, 12], [13, 14, 15]]
SAMPLED = GenerationOptions(max_new_tokens=7, temperature=1.3, seed=9, num_return_sequences=1)


@pytest.fixture
def checkpoint(trained_run: Path) -> Path:
    return trained_run / "checkpoint-2"


def test_every_tensor_of_the_checkpoint_is_in_the_decoder(checkpoint: Path) -> None:
    stage = load_model(checkpoint)
    assert not stage.training
    held = sum(tensor.numel() for tensor in stage_tensors(stage).values())
    stored = [torch.Size(entry.shape or ()).numel() for entry in read_index(checkpoint).values()]
    assert held == sum(stored)


@pytest.mark.parametrize(("pp", "dp", "ep"), [(2, 1, 1), (1, 1, 2), (2, 1, 2), (1, 3, 1)])
def test_texts_are_those_of_one_process_in_every_layout(
    checkpoint: Path, pp: int, dp: int, ep: int
) -> None:
    generator = TextGenerator.open(checkpoint)
    whole = sum(t.numel() for t in stage_tensors(generator.model.stage).values())
    (expected,) = generate_all(generator.model, generator.tokenizer, PROMPTS, SAMPLED)
    (one,) = generate_all(generator.model, generator.tokenizer, PROMPTS[:1], SAMPLED)

    def on_rank(*_: Any) -> tuple[int, bool, list[Any], list[Any]]:
        parallel = ParallelConfig(pp=pp, dp=dp, ep=ep, timeout_s=60)
        model = open_model(
            checkpoint, ModelOptions(device="cpu", parallel=parallel), join(parallel, "cpu")
        )
        size = sum(t.numel() for t in stage_tensors(model.stage).values())
        rounds = generate_all(model, generator.tokenizer, PROMPTS, SAMPLED, batch_size=1)
        all_ = [c for completions in rounds for c in completions]
        # One prompt: the other ranks take part without a sequence.
        lone = [
            c for cs in generate_all(model, generator.tokenizer, PROMPTS[:1], SAMPLED) for c in cs
        ]
        return size, model.is_writer, all_, lone

    found = run_ranks(on_rank, pp * dp * ep)
    assert [(all_, lone) for _, writes, all_, lone in found if writes] == [(expected, one)]
    assert not any(all_ for _, writes, all_, _ in found if not writes)
    assert all(size < whole for size, *_ in found) == (pp * ep > 1)


def test_a_folder_that_is_no_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere is not a folder; name a checkpoint-N"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"holds no config\.json; name a checkpoint-N"):
        load_model(tmp_path)


@pytest.mark.parametrize("damage", ["torn", "gone", "missing tensor", "index"])
def test_damaged_weights_are_one_message_of_value_error(
    checkpoint: Path, tmp_path: Path, damage: str
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    weights = next(copy.glob("model*.safetensors"))
    if damage == "torn":
        weights.write_bytes(weights.read_bytes()[:1000])
    elif damage == "gone":
        weights.unlink()
    elif damage == "index":
        (copy / "manifest.json").unlink()  # what it does not list is no part
        (copy / "model.safetensors.index.json").write_text("{")
    else:
        config = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    for load in (load_model, lambda path: open_model(path, ModelOptions(device="cpu"), None)):
        with pytest.raises(ValueError, match=re.escape(f"{copy} cannot be loaded: ")) as caught:
            load(copy)
        assert "Name another checkpoint, or copy this one again" in str(caught.value)


def test_a_layout_that_cannot_hold_the_model_is_refused_before_any_rank(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match=r"parallel\.ep=4 ranks cannot share num_experts=6 evenly"):
        check_model(checkpoint, ParallelConfig(ep=4))
    with pytest.raises(ValueError, match=r"num_hidden_layers=2 is not divisible by parallel\.pp=3"):
        check_model(checkpoint, ParallelConfig(pp=3))


def test_the_dtype_is_that_of_the_checkpoint_or_the_one_asked_for(
    checkpoint: Path, tmp_path: Path
) -> None:
    for dtype, expected in ((None, torch.float32), ("bfloat16", torch.bfloat16)):
        model = open_model(checkpoint, ModelOptions(device="cpu", dtype=dtype), None)
        assert {p.dtype for p in model.stage.parameters()} == {expected}
    with pytest.raises(ValueError, match="dtype='int8'; choose one of float32, bfloat16, float16"):
        ModelOptions(dtype="int8")
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "dtype": "float8"}))
    with pytest.raises(ValueError, match=r"config\.json: dtype='float8'; choose one of"):
        open_model(copy, ModelOptions(device="cpu"), None)
