"""What tensor-parallel ranks share out, held against mesh-spmd's boxes."""

import math
from typing import Any

import pytest
import torch

from mesh_spmd import ProcessMesh, local_box
from moe_train.layout import parameter_layouts
from moe_train.layout.tensor_cuts import tensor_cut
from moe_train.model import DecoderConfig, DecoderStage

SIZES: dict[str, Any] = {
    "vocab_size": 41,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "intermediate_size": 24,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt_oss": {**GROUPED, "num_local_experts": 4, "sliding_window": 5},
    "qwen2_moe": {
        **GROUPED,
        "num_experts": 4,
        "shared_expert_intermediate_size": 12,
        "mlp_only_layers": [1],
    },
    "deepseek_v3": {
        **SIZES,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 6,
        "q_lora_rank": 5,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 2,
        "v_head_dim": 3,
    },
}


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_element_is_on_as_many_ranks_as_say_and_in_stored_tensors(
    family: str, tp: int
) -> None:
    """Eight ranks; also of what is shared out for updates, where each element is on one rank."""
    config = DecoderConfig.from_dict({"model_type": family, **FAMILIES[family]})
    mesh = ProcessMesh((4, 2), ("dp", "ep"))
    stage = DecoderStage.without_memory(config)
    layouts = parameter_layouts(stage, config, mesh, tp=tp, is_whole=True)
    num_cut = 0
    for name, parameter in stage.named_parameters():
        layout, dim = layouts[name], tensor_cut(name, config, tp)
        assert layout.is_tensor_parallel == (dim is not None)
        if dim is None:
            continue
        num_cut += 1
        for lies, copies in ((layout, 8 // tp), (layout.shared_out(), 1)):
            seen = torch.zeros(parameter.shape, dtype=torch.int64)
            for rank in range(8):
                box = local_box(layout.global_shape, lies.spec, rank)
                seen[box.slices()] += 1
            assert bool((seen == copies).all()), name
        own = local_box(layout.global_shape, layout.spec, 0).shape
        assert own[dim] == math.ceil(parameter.shape[dim] / tp), name
        shape, cuts = layout.held(5)
        assert sum(math.prod(cut.box.local_shape) for cut in cuts) == math.prod(shape)
    assert num_cut >= 10


def test_keys_of_heads_that_do_not_divide_are_whole_and_so_is_what_is_not_of_heads() -> None:
    config = DecoderConfig.from_dict({"model_type": "gpt_oss", **FAMILIES["gpt_oss"]})
    name = "model.layers.0.self_attn.{}"
    cut = {key: tensor_cut(name.format(key), config, 2) for key in ("k_proj.bias", "q_proj.weight")}
    assert cut == {"k_proj.bias": 0, "q_proj.weight": 0}
    assert tensor_cut(name.format("sinks"), config, 4) == 0
    for whole in ("k_proj.weight", "v_proj.bias", "o_proj.bias"):
        assert tensor_cut(name.format(whole), config, 4) is None
    assert tensor_cut(name.format("o_proj.weight"), config, 4) == 1
    assert tensor_cut("model.layers.0.mlp.router.weight", config, 2) is None
    assert tensor_cut(name.format("q_proj.weight"), config, 1) is None
