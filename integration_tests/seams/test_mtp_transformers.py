"""Multi-token prediction against transformers' MtpModel, which reads the weights that we store."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from moe_train.layout import single_rank_layouts, stage_tensors, stored_tensors
from moe_train.model import DecoderConfig, DecoderStage, StageOptions, Target

transformers = pytest.importorskip("transformers")
modeling = pytest.importorskip("transformers.modeling_layers")

LAYERS, COEF = 2, 0.3
SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 12,
    "intermediate_size": 20,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 64,
    "num_mtp_layers": 1,
    "tie_word_embeddings": False,
    "pad_token_id": None,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "q_lora_rank": 12,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "n_group": 2,
        "topk_group": 2,
    },
    "glm4_moe": {"head_dim": 8},
}


def ours_and_theirs(model_type: str, folder: Path) -> tuple[DecoderStage, Any, Any]:
    """Our decoder with random weights, and transformers' two models, loaded from its files."""
    values = {**SIZES, **FAMILIES[model_type]}
    written = transformers.AutoConfig.for_model(model_type, **values)
    written.save_pretrained(folder)
    config = DecoderConfig.from_file(folder)
    assert config.num_nextn_predict_layers == 1
    stage = DecoderStage(
        config,
        StageOptions(layers=range(LAYERS), first=True, last=True, mtp_loss_coef=COEF),
    )
    with torch.no_grad():
        for name, tensor in stage_tensors(stage).items():
            middle = 1.0 if name.endswith("norm.weight") else 0.0
            tensor.copy_(torch.randn(tensor.shape) * 0.2 + middle)
    stored = stored_tensors(single_rank_layouts(stage, config), stage_tensors(stage), rank=0).shards
    tensors = {shard.key: shard.tensor.contiguous().clone() for shard in stored}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    main = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    # transformers knows the published models' layer numbers only.
    main._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{LAYERS}.*"]
    return stage, main, modeling.MtpModel.from_pretrained(main)


@pytest.mark.skipif(not hasattr(modeling, "MtpModel"), reason="this transformers has no MtpModel")
@pytest.mark.parametrize("model_type", FAMILIES)
def test_loss_and_gradients_are_those_of_transformers(
    seed: int, tmp_path: Path, model_type: str
) -> None:
    stage, main, mtp = ours_and_theirs(model_type, tmp_path)
    tokens = torch.randint(0, SIZES["vocab_size"], (3, 11))
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    positions = torch.arange(10).expand(3, 10)
    out = main(inputs, output_hidden_states=True)
    # Behind the final norm; the token ahead comes with its own position.
    drafted = mtp.forward_layer(
        0, out.hidden_states[-1][:, :-1], positions[:, 1:], None, input_ids=inputs[:, 1:]
    )
    main_loss = F.cross_entropy(out.logits.flatten(0, 1), labels.flatten(), reduction="sum")
    logits = mtp.shared_head(drafted)
    mtp_loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 2:].flatten(), reduction="sum")
    ((main_loss + COEF * mtp_loss) / 30).backward()
    got = stage(inputs, positions, target=Target(labels, 1 / 30, inputs))
    got.loss.backward()
    record = stage.take_record()
    assert record.loss.item() == pytest.approx(main_loss.item() / 30, rel=1e-5)
    assert record.mtp_loss.item() == pytest.approx(COEF * mtp_loss.item() / 30, rel=1e-5)
    pairs = [
        (stage.model.embed_tokens.weight, main.model.embed_tokens.weight),
        (stage.lm_head.weight, main.lm_head.weight),
        (stage.model.norm.weight, main.model.norm.weight),
    ]
    ours = dict(stage.model.layers[str(LAYERS)].named_parameters())
    theirs = dict(mtp.layers[0].named_parameters())
    names = {name: name.replace("post_norm", "shared_head.norm") for name in theirs}
    assert set(names.values()) == set(ours)
    pairs += [(ours[names[name]], parameter) for name, parameter in theirs.items()]
    for mine, other in pairs:
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=5e-6)
