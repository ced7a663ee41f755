"""Every rope form against transformers: logits, and generation past the original context."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from moe_train.generation import load_model
from moe_train.model import DecoderConfig, DecoderStage, KeyValueCache

ORIGINAL, LENGTH = 16, 24
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 20,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
    "pad_token_id": None,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "tie_word_embeddings": False,
}
LATENT = {
    "head_dim": 8,
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "q_lora_rank": 9,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 7,
}
FORMS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 3.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "longrope": {
        "original_max_position_embeddings": ORIGINAL,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.0, 1.5, 2.0, 4.0],
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {},
    "deepseek_v3": LATENT,
    "glm4_moe": {"hidden_size": 64, "head_dim": 16, "partial_rotary_factor": 0.5},
    "gpt_oss": {"sliding_window": 64},
}


def values_of(family: str, form: str) -> dict[str, Any]:
    """In the spelling of transformers 4."""
    # What the original context is: dynamic has no other key for it.
    length = ORIGINAL if form == "dynamic" else 64
    rope = {"type": form, **FORMS[form]}
    return {
        **SIZES,
        **FAMILIES[family],
        "model_type": family,
        "rope_theta": 1000.0,
        "rope_scaling": rope,
        "max_position_embeddings": length,
    }


def models(family: str, form: str, folder: Path) -> tuple[PreTrainedModel, DecoderStage]:
    torch.manual_seed(5)
    known = AutoConfig.for_model(family).to_dict().keys() | {"rope_scaling", "rope_theta"}
    given = {k: v for k, v in values_of(family, form).items() if k in known}
    config = AutoConfig.for_model(**given)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    model.save_pretrained(folder)
    return model, load_model(folder)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_logits_within_and_past_the_original_context_are_those_of_transformers(
    tmp_path: Path, family: str, form: str
) -> None:
    model, stage = models(family, form, tmp_path)
    assert (
        DecoderConfig.from_file(tmp_path).rotary
        == DecoderConfig.from_dict(values_of(family, form)).rotary
    ), "the spellings of transformers 4 and 5 differ"
    tokens = torch.randint(0, 64, (2, LENGTH))
    found = []
    for length in (ORIGINAL - 4, LENGTH):
        positions = torch.arange(length).expand(2, length)
        theirs = model(tokens[:, :length], use_cache=False).logits
        ours = stage.logits(stage.hidden_states(tokens[:, :length], positions)[0])
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        found.append(ours[:, : ORIGINAL - 4])
    depends = (found[0] - found[1]).abs().max() > 1e-3
    assert bool(depends) == (form in ("dynamic", "longrope"))


@pytest.mark.parametrize("form", ["dynamic", "longrope"])
@torch.no_grad()
def test_cached_generation_past_the_original_context_is_that_of_transformers(
    tmp_path: Path, form: str
) -> None:
    model, stage = models("qwen3_moe", form, tmp_path)
    tokens = torch.randint(0, 64, (1, LENGTH))
    cache, past = KeyValueCache(), None
    for start, end in ((0, ORIGINAL - 3), *((n, n + 1) for n in range(ORIGINAL - 3, LENGTH))):
        out = model(tokens[:, start:end], past_key_values=past, use_cache=True)
        past = out.past_key_values
        hidden = stage.hidden_states(tokens[:, start:end], torch.arange(start, end)[None], cache)[0]
        torch.testing.assert_close(stage.logits(hidden), out.logits, rtol=1e-5, atol=1e-5)
