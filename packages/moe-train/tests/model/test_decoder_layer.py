import pytest
import torch

from moe_pipeline import MoELayer
from moe_train.model.config import DecoderConfig
from moe_train.model.decoder_layer import DecoderLayer, DenseMLP, LayerOptions, moe_config
from moe_train.model.layers import Attention, attention_contexts
from moe_train.model.mla import LatentAttention

SIZES = {
    "vocab_size": 20,
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
LATENT = {
    "q_lora_rank": None,
    "kv_lora_rank": 6,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
    "n_routed_experts": 4,
    "first_k_dense_replace": 1,
}


@pytest.mark.parametrize(
    ("model_type", "changes", "attention"),
    [("deepseek_v2", LATENT, LatentAttention), ("qwen3_moe", {"mlp_only_layers": [0]}, Attention)],
)
def test_the_configuration_chooses_attention_and_experts(
    model_type: str, changes: dict[str, object], attention: type
) -> None:
    config = DecoderConfig.from_dict({**SIZES, **changes, "model_type": model_type})
    layers = [DecoderLayer(config, n, LayerOptions(dtype=torch.float64)) for n in range(2)]
    assert all(isinstance(layer.self_attn, attention) for layer in layers)
    assert isinstance(layers[0].mlp, DenseMLP) and isinstance(layers[1].mlp, MoELayer)
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    positions = torch.arange(5).expand(2, 5)
    contexts = attention_contexts(positions, config.rotary, torch.float64, windows={None})
    context = contexts[None]
    with torch.no_grad():
        for layer in layers:
            for parameter in layer.parameters():
                parameter.normal_(std=0.2)
            out, routed = layer(x, context, None)
            attended = x + layer.self_attn(layer.input_layernorm(x), context, None)
            normed = layer.post_attention_layernorm(attended)
            inner = layer.mlp(normed)
            hidden = inner if routed is None else inner.hidden
            torch.testing.assert_close(out, attended + hidden)
    assert routed is not None and int(routed.load_E.sum()) == 20


def test_the_job_decides_losses_and_implementation_and_the_model_the_rest() -> None:
    config = DecoderConfig.from_dict({**SIZES, "model_type": "qwen3_moe", "norm_topk_prob": True})
    options = LayerOptions(
        aux_loss_coef=0.5, aux_loss_scope="sequence", experts_implementation="loop"
    )
    moe = moe_config(config, options)
    assert moe.losses.router_aux_loss_coef == 0.5
    assert moe.losses.moe_aux_loss_scope == "sequence"
    assert moe.experts.experts_implementation == "loop"
    assert moe.router.norm_topk_prob and moe.num_experts == 4
