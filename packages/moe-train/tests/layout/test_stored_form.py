import pytest
import torch

from mesh_spmd import ProcessMesh
from moe_train.layout.parameters import (
    is_expert,
    parameter_layouts,
    single_rank_layouts,
    stage_tensors,
    stored_tensors,
)
from moe_train.layout.stored_form import stored_form
from moe_train.model.config import DecoderConfig
from moe_train.model.init import initialise
from moe_train.model.stage import DecoderStage, StageOptions

VALUES = {
    "vocab_size": 20,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "moe_intermediate_size": 6,
    "intermediate_size": 6,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 2,
}
LAYER = "model.layers.2"


def keys_of(model_type: str, name: str, *shape: int) -> list[str]:
    return [view.key for view in stored_form(model_type, name, shape).views]


def test_expert_tensors_are_stored_one_by_one_under_the_names_of_the_family() -> None:
    experts = f"{LAYER}.mlp.experts"
    for model_type in ("qwen2_moe", "olmoe", "deepseek_v3", "ernie4_5_moe"):
        assert keys_of(model_type, f"{experts}.gate_up_proj", 2, 12, 8) == [
            f"{experts}.{e}.{part}_proj.weight" for e in range(2) for part in ("gate", "up")
        ]
    theirs = f"{LAYER}.block_sparse_moe"
    assert keys_of("mixtral", f"{experts}.gate_up_proj", 2, 12, 8) == [
        f"{theirs}.experts.{e}.{part}.weight" for e in range(2) for part in ("w1", "w3")
    ]
    assert keys_of("mixtral", f"{LAYER}.mlp.gate.weight", 2, 8) == [f"{theirs}.gate.weight"]
    assert keys_of("gpt_oss", f"{experts}.gate_up_proj", 2, 12, 8) == [f"{experts}.gate_up_proj"]


@pytest.mark.parametrize(
    ("model_type", "ours", "theirs"),
    [
        ("qwen2_moe", "mlp.shared_experts.up_proj.weight", "mlp.shared_expert.up_proj.weight"),
        ("gpt_oss", "mlp.gate.bias", "mlp.router.bias"),
        (
            "deepseek_v3",
            "mtp_block.mlp.gate.e_score_correction_bias",
            "mlp.gate.e_score_correction_bias",
        ),
        ("deepseek_v3", "shared_head.norm.weight", "shared_head.norm.weight"),
        ("glm4_moe", "mlp.gate_proj.weight", "mlp.gate_proj.weight"),
        ("mixtral", "self_attn.q_proj.weight", "self_attn.q_proj.weight"),
    ],
)
def test_other_tensors_have_the_names_of_the_file(model_type: str, ours: str, theirs: str) -> None:
    assert keys_of(model_type, f"{LAYER}.{ours}", 5) == [f"{LAYER}.{theirs}"]


def test_the_bias_of_ernie_has_a_dim_more_on_disk_and_shares_memory() -> None:
    form = stored_form("ernie4_5_moe", f"{LAYER}.mlp.gate.e_score_correction_bias", (5,))
    assert form.views[0].key == f"{LAYER}.mlp.moe_statics.e_score_correction_bias"
    assert form.shape == (1, 5)
    bias = torch.zeros(5)
    form.to_stored(bias).fill_(3.0)
    assert bias.tolist() == [3.0] * 5


def gpt_oss_stage() -> tuple[DecoderConfig, DecoderStage]:
    config = DecoderConfig.from_dict({**VALUES, "model_type": "gpt_oss", "num_local_experts": 4})
    return config, DecoderStage(config, StageOptions(layers=range(1), first=True, last=True))


def test_gpt_oss_stores_gate_and_up_alternating_and_is_written_back() -> None:
    config, stage = gpt_oss_stage()
    tensors = stage_tensors(stage)
    for tensor in tensors.values():
        tensor.copy_(torch.randn(tensor.shape))
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    stored = stored_tensors(single_rank_layouts(stage, config), tensors, 0)
    by_key = {shard.key: shard.tensor for shard in stored.shards}
    name = "model.layers.0.mlp.experts.gate_up_proj"
    for half, start in ((slice(0, 6), 0), (slice(6, 12), 1)):
        ours = before[name][:, half].transpose(1, 2)
        assert torch.equal(by_key[name][:, :, start::2], ours)
        assert torch.equal(by_key[f"{name}_bias"][:, start::2], before[f"{name}_bias"][:, half])
    for shard in stored.shards:
        shard.tensor.mul_(2.0)
    stored.write_back()
    for key, tensor in tensors.items():
        assert torch.equal(tensor, before[key] * 2.0), key


def test_initial_weights_of_tensors_that_hold_all_experts_do_not_depend_on_the_layout() -> None:
    config, stage = gpt_oss_stage()

    def drawn(ranks: int) -> dict[str, torch.Tensor]:
        result: dict[str, torch.Tensor] = {}
        mesh = ProcessMesh((1, ranks), ("dp", "ep"))
        for rank in range(ranks):
            per_rank = 4 // ranks
            held = {
                name: torch.full_like(tensor[: per_rank if is_expert(name) else None], torch.nan)
                for name, tensor in stage_tensors(stage).items()
            }
            stored = stored_tensors(parameter_layouts(stage, config, mesh), held, rank)
            for shard in stored.shards:
                offset = shard.box.offset
                initialise(shard.key, shard.tensor, seed=3, std=0.1, offset=offset)
            stored.write_back()
            for name, tensor in held.items():
                parts = [result[name]] if name in result and is_expert(name) else []
                result[name] = torch.cat([*parts, tensor])
        return result

    one, two = drawn(1), drawn(2)
    for name, tensor in one.items():
        assert torch.equal(tensor, two[name]), name
    weights = one["model.layers.0.mlp.experts.gate_up_proj"]
    assert 0.05 < float(weights.std()) < 0.2
    assert not bool(one["model.layers.0.mlp.experts.down_proj_bias"].any())
