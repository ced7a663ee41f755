"""The guide to a new family, followed: its entry is executed and held against transformers."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, Dots1Config

from moe_train.generation import load_model
from moe_train.layout import chosen_names
from moe_train.model import DecoderConfig, Target, families
from moe_train.model.known_keys import unknown_keys
from workspace import ROOT

GUIDES = [ROOT / "docs" / "guides" / f"add-a-family{ending}" for ending in (".md", ".zh.md")]


def entry(guide: Path) -> str:
    (code,) = re.findall(r"```python\n(.*?)```", guide.read_text(encoding="utf-8"), re.DOTALL)
    return str(code)


@pytest.fixture
def new_family() -> Iterator[None]:
    exec(entry(GUIDES[0]), {**vars(families), "replace": replace})
    yield
    del families.RULES["dots1"]


def test_both_languages_have_the_same_entry() -> None:
    assert entry(GUIDES[0]) == entry(GUIDES[1])


@pytest.mark.usefixtures("new_family")
def test_the_family_of_the_guide_equals_transformers(tmp_path: Path) -> None:
    torch.manual_seed(3)
    config = Dots1Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=20,
        moe_intermediate_size=12,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        n_shared_experts=1,
        n_routed_experts=6,
        n_group=3,
        topk_group=2,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        first_k_dense_replace=1,
        routed_scaling_factor=1.5,
        sliding_window=4,
        max_window_layers=2,
        attention_bias=True,
        initializer_range=0.2,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, tensor in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                tensor.normal_(std=0.1)
    model.save_pretrained(tmp_path)
    assert unknown_keys(config.to_dict()) == []
    values = {**config.to_dict(), "layer_types": None}
    assert DecoderConfig.from_dict(values).windows == (None, None, 4)
    stage = load_model(tmp_path).train()
    tokens, positions = torch.randint(0, 64, (2, 12)), torch.arange(12).expand(2, 12)
    logits = stage.logits(stage.hidden_states(tokens, positions)[0])
    expected = model(tokens, use_cache=False).logits
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    labels = torch.randint(0, 64, (2, 12))
    loss = stage(tokens, positions, target=Target(labels, 1 / 24)).loss
    assert loss is not None
    loss.backward()
    F.cross_entropy(expected.flatten(0, 1), labels.flatten()).backward()
    theirs = dict(model.named_parameters())
    assert theirs.keys() == {name for name, _ in stage.named_parameters()}
    for name, parameter in stage.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=1e-4, atol=1e-6)
    experts = chosen_names("train.trainable", ["*.experts.*.*_proj.weight"], stage.config)
    assert len(experts) == 4
