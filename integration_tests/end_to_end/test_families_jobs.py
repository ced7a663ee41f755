"""The training job with every family: stages, shared experts, tied embeddings, MTP layers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)

from moe_train.config import Config
from moe_train.data import Batch
from moe_train.layout import read_decoder
from moe_train.parallel import start
from moe_train.training import build_runner, read_model_config
from moe_train.training.step import StepResult
from ranktest import run_ranks

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 20,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 6),
    **dict.fromkeys(("num_experts_per_tok", "moe_k"), 2),
    "shared_expert_intermediate_size": 20,
    "num_mtp_layers": 0,
    "first_k_dense_replace": 1,
}
LATENT: dict[str, Any] = {
    "head_dim": 6,
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 7,
    "q_lora_rank": 9,
}
NEW_TOKENIZER = "tokenizer.train=true"  # the models of these tests come without one
TIED = {"tie_word_embeddings": True}

# Model type -> what its configuration has besides the sizes, and what a job in two stages has.
JOBS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "mixtral": ({"sliding_window": 7}, ("parallel.ep=2",)),
    "olmoe": ({}, ()),
    "qwen2_moe": (TIED, ("parallel.ep=2",)),
    "qwen3_moe": ({}, ()),
    "deepseek_v2": (LATENT, ()),
    "deepseek_v3": ({**LATENT, "n_group": 3, "topk_group": 2}, ("parallel.ep=2",)),
    "glm4_moe": ({"use_qk_norm": True}, ()),
    "ernie4_5_moe": (TIED, ()),
    "gpt_oss": ({**TIED, "sliding_window": 5}, ("parallel.ep=2",)),
}


def model_of(model_type: str) -> PreTrainedModel:
    """transformers' model with random weights, every bias and sink off 0."""
    torch.manual_seed(7)
    known = AutoConfig.for_model(model_type).to_dict()
    sizes = {key: value for key, value in SIZES.items() if key in known}
    config = AutoConfig.for_model(model_type, **{**sizes, **JOBS[model_type][0]})
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            middle = 1.0 if name.endswith("norm.weight") else 0.0
            tensor.copy_(torch.randn(tensor.shape) * 0.2 + middle)
    return model


@pytest.mark.parametrize("model_type", JOBS)
def test_a_job_in_two_stages_trains_and_saves_every_family(
    configure: Callable[..., Config], train: Callable[..., None], tmp_path: Path, model_type: str
) -> None:
    reference = model_of(model_type)
    reference.save_pretrained(tmp_path / "start")
    overrides = (
        f"model.init_from={tmp_path / 'start'}",
        NEW_TOKENIZER,
        "parallel.pp=2",
        *JOBS[model_type][1],
        "train.max_steps=2",
        "train.gradient_accumulation_steps=2",
    )
    train(configure(*overrides))
    model, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "run" / "checkpoint-2", output_loading_info=True
    )
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not report[problem], (problem, report[problem])
    before = reference.state_dict()
    unchanged = [n for n, t in model.state_dict().items() if torch.equal(t, before[n])]
    assert all("e_score_correction_bias" in name for name in unchanged), unchanged


def test_the_decoder_of_a_model_of_text_and_images_is_trained_as_qwen3_moe(
    configure: Callable[..., Config],
    train: Callable[..., None],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    known = AutoConfig.for_model("qwen3_vl_moe_text").to_dict()
    text = {key: value for key, value in SIZES.items() if key in known}
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]}
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 32}
    vision |= {"num_position_embeddings": 16, "patch_size": 4, "deepstack_visual_indexes": [0]}
    torch.manual_seed(7)
    whole = AutoModelForImageTextToText.from_config(
        AutoConfig.for_model(
            "qwen3_vl_moe",
            text_config={**text, "rope_parameters": rope},
            vision_config=vision,
        )
    )
    start = tmp_path / "start"
    whole.save_pretrained(start)
    tensors = load_file(start / "model.safetensors")
    for key in tensors:
        if ".experts." in key:  # as transformers 4 wrote, and what is published
            tensors[key] = tensors[key].transpose(1, 2).contiguous()
    save_file(tensors, start / "model.safetensors", metadata={"format": "pt"})
    lr = ("optimizer.lr=1e-30", "train.max_steps=1", "parallel.pp=2")
    train(configure(f"model.init_from={start}", NEW_TOKENIZER, *lr))
    assert "'qwen3_vl_moe'; its decoder of text is trained, and saved as 'qwen3_moe'" in caplog.text
    model, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "run" / "checkpoint-1", output_loading_info=True
    )
    assert type(model).__name__ == "Qwen3MoeForCausalLM"
    assert not report["missing_keys"] and not report["unexpected_keys"]
    tokens = torch.arange(9)[None] * 50
    with torch.no_grad():
        found, expected = (m.eval()(input_ids=tokens).logits for m in (model, whole))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def steps_of(config: Config, weights: Path) -> list[StepResult]:
    """Three steps from `weights` in the configured layout; what rank 0 reports."""

    def fn(rank: int, world_size: int) -> list[StepResult]:
        parallel = start(config)
        runner, checkpointer = build_runner(config, read_model_config(config), parallel, {})
        checkpointer.load_weights(weights)
        batches = []
        for seed in range(6):
            generator = torch.Generator().manual_seed(seed)
            tokens = torch.randint(0, 512, (4, 13), generator=generator)
            positions = torch.arange(12).expand(4, 12).clone()
            positions[1:, 5:] -= 5
            rows = slice(parallel.data_rank, None, parallel.num_data_ranks)
            parts = (tokens[rows, :-1], tokens[rows, 1:], positions[rows])
            batches.append(Batch(input_ids=parts[0], labels=parts[1], position_ids=parts[2]))
        return [runner.train(batches[i : i + 2], lr=1e-3) for i in (0, 2, 4)]

    return run_ranks(fn, config.world_size, timeout_s=120)[0]  # type: ignore[return-value]


@pytest.mark.parametrize("model_type", ["ernie4_5_moe", "gpt_oss", "deepseek_v3"])
def test_two_stages_train_as_one_process_does(
    configure: Callable[..., Config], tmp_path: Path, model_type: str
) -> None:
    weights = tmp_path / "weights"
    model_of(model_type).save_pretrained(weights)
    if model_type == "deepseek_v3":
        add_mtp_layer(weights)
    common = (
        f"model.init_from={weights}",
        "train.global_batch_size=8",
        "train.gradient_accumulation_steps=2",
        "train.mtp_loss_coef=0.3",
        "moe.aux_loss_coef=0.01",
    )
    one = steps_of(configure(*common), weights)
    for layout in (("parallel.pp=2",), ("parallel.pp=2", "parallel.ep=2")):
        for a, b in zip(one, steps_of(configure(*common, *layout), weights), strict=True):
            assert abs(a.loss - b.loss) <= 2e-6 * a.loss, (layout, a.loss, b.loss)
            assert abs(a.mtp_loss - b.mtp_loss) <= 2e-6 * a.mtp_loss, layout
            assert abs(a.grad_norm - b.grad_norm) <= 1e-5 * a.grad_norm, layout
            assert a.load_LE == b.load_LE, layout
    assert (one[0].mtp_loss > 0) == (model_type == "deepseek_v3")


def tensors_of(folder: Path, files: str) -> dict[str, Tensor]:
    """All tensors of the files whose names match."""
    stored = [load_file(file) for file in folder.glob(f"{files}.safetensors")]
    return {key: tensor for tensors in stored for key, tensor in tensors.items()}


def add_mtp_layer(weights: Path) -> dict[str, Tensor]:
    """Give a DeepSeek-V3 checkpoint the layer that transformers leaves out; return its tensors."""
    stored = load_file(weights / "model.safetensors")
    last = {k: v for k, v in stored.items() if k.startswith("model.layers.3.")}
    extra = {k.replace(".3.", ".4.", 1): torch.randn(v.shape) * 0.2 for k, v in last.items()}
    prefix = "model.layers.4."
    for name in ("enorm", "hnorm", "shared_head.norm"):
        extra[f"{prefix}{name}.weight"] = torch.randn(32) * 0.2 + 1.0
    extra[f"{prefix}eh_proj.weight"] = torch.randn(32, 64) * 0.2
    save_file({**stored, **extra}, weights / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((weights / "config.json").read_text())
    (weights / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    return extra


@pytest.mark.parametrize("coef", [0.0, 0.3])
def test_layers_for_multi_token_prediction_are_in_the_saved_checkpoint(
    configure: Callable[..., Config], train: Callable[..., None], tmp_path: Path, coef: float
) -> None:
    weights = tmp_path / "start"
    model_of("deepseek_v3").save_pretrained(weights)
    assert read_decoder(weights).num_nextn_predict_layers == 0
    extra = add_mtp_layer(weights)
    assert read_decoder(weights).num_nextn_predict_layers == 1
    overrides = (f"model.init_from={weights}", f"train.mtp_loss_coef={coef}", "train.max_steps=1")
    train(configure(*overrides, NEW_TOKENIZER, "parallel.pp=2"))
    folder = tmp_path / "run" / "checkpoint-1"
    saved = tensors_of(folder, "model*")
    for key, tensor in extra.items():
        is_trained = coef > 0 and not key.endswith("e_score_correction_bias")
        assert torch.equal(saved[key], tensor) != is_trained, key
    assert read_decoder(folder).num_nextn_predict_layers == 1
    _, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert all(key.startswith("model.layers.4.") for key in report["unexpected_keys"])


@pytest.mark.parametrize("model_type", ["gpt_oss", "deepseek_v3"])
def test_a_resumed_job_goes_on_bit_for_bit(
    configure: Callable[..., Config], train: Callable[..., None], tmp_path: Path, model_type: str
) -> None:
    weights = tmp_path / "start"
    model_of(model_type).save_pretrained(weights)
    has_bias = model_type == "deepseek_v3"
    common = (
        f"model.init_from={weights}",
        NEW_TOKENIZER,
        "parallel.pp=2",
        f"parallel.ep={2 if has_bias else 1}",
        "train.max_steps=2",
        "train.dtype=bfloat16",
        "train.master_weights=true",
        "checkpoint.interval_steps=1",
        f"moe.update_expert_bias={str(has_bias).lower()}",
    )
    train(configure(*common))
    middle = tmp_path / "run" / "checkpoint-1"
    train(configure(*common, f"train.output_dir={tmp_path / 'again'}"), str(middle))
    folders = (middle, tmp_path / "run" / "checkpoint-2", tmp_path / "again" / "checkpoint-2")
    first, last, again = (tensors_of(folder, "*") for folder in folders)
    assert last.keys() == again.keys() == first.keys()
    assert not [key for key, tensor in last.items() if not torch.equal(tensor, again[key])]
    moved = [key for key, tensor in last.items() if not torch.equal(tensor, first[key])]
    assert any("experts.gate_up_proj" in key or "experts.0.gate_proj" in key for key in moved)
    assert any("e_score_correction_bias" in key for key in moved) == has_bias
