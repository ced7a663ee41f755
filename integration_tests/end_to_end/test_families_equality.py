"""Every family's decoder against transformers': logits, loss, gradients, files, generation."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from moe_train.generate import load_model, next_logits
from moe_train.layout import single_rank_layouts, stage_tensors, stored_tensors
from moe_train.model.layers import KeyValueCache
from moe_train.model.stage import DecoderStage, Target
from unified_ckpt import save

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 20,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 0,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 6),
    "moe_num_experts": 6,
    **dict.fromkeys(("num_experts_per_tok", "moe_k"), 2),
    **dict.fromkeys(("n_shared_experts", "moe_num_shared_experts"), 2),
    "shared_expert_intermediate_size": 20,
    "router_aux_loss_coef": 0.0,
    "tie_word_embeddings": False,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4.0,
}
LATENT = {
    "head_dim": 6,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 7,
}
GROUPS = {"n_group": 3, "topk_group": 2, "routed_scaling_factor": 1.7, "first_k_dense_replace": 1}

# Case -> model type, and what the configuration has besides the sizes.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {}),
    "mixtral_window": ("mixtral", {"sliding_window": 4}),
    "qwen2_moe": ("qwen2_moe", {"decoder_sparse_step": 2}),
    "qwen2_moe_window": (
        "qwen2_moe",
        {"use_sliding_window": True, "sliding_window": 3, "tie_word_embeddings": True},
    ),
    "qwen3_moe": ("qwen3_moe", {"norm_topk_prob": True, "attention_bias": True}),
    "qwen3_moe_window": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 5}),
    "olmoe": ("olmoe", {"clip_qkv": 0.6}),
    "deepseek_v2": (
        "deepseek_v2",
        {**LATENT, **GROUPS, "q_lora_rank": None, "topk_method": "group_limited_greedy"},
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {
            **LATENT,
            **GROUPS,
            "q_lora_rank": 9,
            "rope_parameters": {**YARN, "mscale": 0.8, "mscale_all_dim": 0.6},
            "num_mtp_layers": 0,
        },
    ),
    "glm4_moe": (
        "glm4_moe",
        {"use_qk_norm": True, "attention_bias": True, "num_mtp_layers": 0},
    ),
    "glm4_moe_plain": ("glm4_moe", {"first_k_dense_replace": 2, "num_mtp_layers": 0}),
    "ernie4_5_moe": ("ernie4_5_moe", {"tie_word_embeddings": True}),
    "ernie4_5_moe_some": (
        "ernie4_5_moe",
        {"moe_layer_start_index": 1, "moe_layer_end_index": 2, "moe_layer_interval": 2},
    ),
    "gpt_oss": ("gpt_oss", {"sliding_window": 3, "rope_parameters": {**YARN, "truncate": False}}),
}


def reference_of(case: str, **changes: Any) -> PreTrainedModel:
    """transformers' model with random weights: norms around 1, every bias and sink off 0."""
    model_type, values = CASES[case]
    known = AutoConfig.for_model(model_type).to_dict()
    sizes = {key: value for key, value in SIZES.items() if key in known}
    config = AutoConfig.for_model(model_type, **{**sizes, **values, **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            middle = 1.0 if name.endswith("norm.weight") else 0.0
            tensor.copy_(torch.randn(tensor.shape) * 0.2 + middle)
    return model.eval()


def save_reference(model: PreTrainedModel, folder: Path) -> Path:
    """A checkpoint folder as transformers writes it."""
    model.save_pretrained(folder)
    return folder


def batch_of(vocab_size: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, labels (some ignored) and positions; two sequences hold several documents."""
    tokens = torch.randint(0, vocab_size, (3, 12))
    labels = torch.randint(0, vocab_size, (3, 12))
    labels[0, :3] = -100
    positions = torch.arange(12).expand(3, 12).clone()
    positions[0, 7:] -= 7
    positions[1, 5:] -= 5
    positions[1, 8:] -= 3
    return tokens, labels, positions


ATOL = 1e-5


def reference_loss(model: PreTrainedModel, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    tokens, labels, positions = batch
    logits = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def stored_gradients(stage: DecoderStage) -> dict[str, Tensor]:
    """Our gradients under the keys and in the layout of the checkpoint."""
    layouts = single_rank_layouts(stage, stage.config)
    gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in stage.named_parameters()
    }
    shards = stored_tensors(layouts, gradients, rank=0).shards
    return {shard.key: shard.tensor for shard in shards}


def reference_gradients(model: PreTrainedModel, folder: Path) -> dict[str, Tensor]:
    """transformers' gradients, stored by its own rules for weights."""
    with torch.no_grad():
        for parameter in model.parameters():
            gradient = parameter.grad
            parameter.copy_(torch.zeros_like(parameter) if gradient is None else gradient)
    save_reference(model, folder)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("case", CASES)
def test_logits_loss_and_gradients_equal_those_of_transformers(case: str, tmp_path: Path) -> None:
    reference = reference_of(case)
    stage = load_model(save_reference(reference, tmp_path / "weights"))
    tokens, labels, positions = batch = batch_of()
    with torch.no_grad():
        hidden, _ = stage.hidden_states(tokens, positions)
        expected = reference(input_ids=tokens, position_ids=positions, use_cache=False).logits
        torch.testing.assert_close(stage.logits(hidden), expected, rtol=1e-5, atol=ATOL)
    loss = stage(tokens, positions, target=Target(labels, 1.0)).loss
    theirs = reference_loss(reference, batch)
    torch.testing.assert_close(loss, theirs, rtol=1e-5, atol=ATOL)
    loss.backward()
    theirs.backward()
    ours = stored_gradients(stage)
    for key, gradient in reference_gradients(reference, tmp_path / "gradients").items():
        if "e_score_correction_bias" in key:
            continue
        scale = float(gradient.abs().max())
        assert scale > 0 or "experts" in key, f"{key}: the reference has no gradient"
        torch.testing.assert_close(
            ours.pop(key),
            gradient,
            rtol=1e-5,
            atol=ATOL * max(scale, 1.0),
            msg=lambda m: f"{key}: {m}",
        )
    assert not ours, f"transformers has no {sorted(ours)}"


@pytest.mark.parametrize("case", CASES)
def test_a_saved_decoder_opens_in_transformers_bit_for_bit(case: str, tmp_path: Path) -> None:
    reference = reference_of(case)
    stage = load_model(save_reference(reference, tmp_path / "theirs"))
    stored = stored_tensors(single_rank_layouts(stage, stage.config), stage_tensors(stage), rank=0)
    files = {"config.json": stage.config.to_json("float32").encode()}
    save({"model": stored.shards}, checkpoint_id=tmp_path / "ours", files=files)
    model, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True, dtype="auto"
    )
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not report[problem], (problem, report[problem])
    expected = reference.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected.pop(name)), name
    assert not expected
    theirs, ours = (load_file(tmp_path / f / "model.safetensors") for f in ("theirs", "ours"))
    assert {k: v.shape for k, v in ours.items()} == {k: v.shape for k, v in theirs.items()}
    given, written = (
        json.loads((tmp_path / f / "config.json").read_text()) for f in ("theirs", "ours")
    )
    assert written == given


@pytest.mark.parametrize("case", CASES)
def test_generation_with_the_cache_equals_the_whole_sequence(case: str, tmp_path: Path) -> None:
    stage = load_model(save_reference(reference_of(case), tmp_path))
    tokens = torch.randint(0, 64, (11,)).tolist()
    cache, done = KeyValueCache(), 0
    for length in (4, 1, 3, 1, 1, 1):
        logits = next_logits(stage, tokens[done : done + length], done, cache)
        done += length
        whole = next_logits(stage, tokens[:done], 0, KeyValueCache())
        torch.testing.assert_close(logits, whole, rtol=1e-5, atol=ATOL)
