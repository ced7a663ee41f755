import pytest
import torch
from torch import nn

from mesh_spmd import ProcessMesh
from moe_train.layout.parameters import (
    is_expert,
    parameter_layouts,
    single_rank_layouts,
    stored_tensors,
)
from moe_train.model.config import DecoderConfig
from moe_train.model.init import initialise
from moe_train.model.stage import DecoderStage, StageOptions

CONFIG = DecoderConfig.from_dict(
    {
        "model_type": "qwen3_moe",
        "vocab_size": 20,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "num_experts": 12,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 6,
        "intermediate_size": 8,
    }
)


def whole_stage() -> DecoderStage:
    return DecoderStage(CONFIG, StageOptions(layers=range(1), first=True, last=True))


class Shards(nn.Module):
    """The experts of one ep rank, under the names of the decoder."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"layers": nn.ModuleDict({"0": nn.ModuleDict()})})
        layer = self.model["layers"]["0"]  # type: ignore[index]
        layer["mlp"] = nn.ModuleDict({"experts": nn.Module()})
        layer["mlp"]["experts"].gate_up_proj = nn.Parameter(torch.zeros(experts, 12, 8))
        layer["mlp"]["experts"].down_proj = nn.Parameter(torch.zeros(experts, 8, 6))


def test_every_stored_expert_is_held_by_exactly_the_ranks_of_its_ep_coordinate() -> None:
    mesh = ProcessMesh((2, 3), ("dp", "ep"))
    holders: dict[str, list[int]] = {}
    for rank in range(6):
        module = Shards(4)
        for name, layout in parameter_layouts(module, CONFIG, mesh).items():
            tensor = module.get_parameter(name)
            for shard in stored_tensors({name: layout}, {name: tensor}, rank).shards:
                assert shard.box.offset == (0, 0)
                assert tuple(shard.tensor.shape) == tuple(shard.box.global_shape)
                holders.setdefault(shard.key, []).append(rank)
    assert len(holders) == 12 * 3
    for expert in range(12):
        ep = expert // 4
        for projection in ("gate_proj", "up_proj", "down_proj"):
            key = f"model.layers.0.mlp.experts.{expert}.{projection}.weight"
            assert holders[key] == [ep, ep + 3]


def test_writing_to_the_shards_fills_the_parameter() -> None:
    stage = whole_stage()
    layouts = single_rank_layouts(stage, CONFIG)
    for name, parameter in stage.named_parameters():
        parameter.data.fill_(float("nan"))
        for shard in stored_tensors(layouts, {name: parameter}, 0, "/exp_avg").shards:
            assert shard.key.endswith("/exp_avg")
            shard.tensor.fill_(1.0)
        assert bool((parameter == 1).all()), name


def test_gate_stands_before_up() -> None:
    stage = whole_stage()
    name = "model.layers.0.mlp.experts.gate_up_proj"
    parameter = stage.get_parameter(name)
    parameter.data.copy_(torch.arange(parameter.numel()).view_as(parameter))
    shards = stored_tensors(single_rank_layouts(stage, CONFIG), {name: parameter}, 0).shards
    by_key = {shard.key: shard.tensor for shard in shards}
    for expert in (0, 2, 11):
        prefix = f"model.layers.0.mlp.experts.{expert}"
        assert torch.equal(by_key[f"{prefix}.gate_proj.weight"], parameter[expert, :6])
        assert torch.equal(by_key[f"{prefix}.up_proj.weight"], parameter[expert, 6:])


def test_initial_weights_do_not_depend_on_the_layout() -> None:
    stage = whole_stage()
    layouts = single_rank_layouts(stage, CONFIG)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    with torch.no_grad():
        whole = stage.get_parameter(name).data
        for shard in stored_tensors(layouts, {name: whole}, 0).shards:
            initialise(shard.key, shard.tensor, seed=9, std=0.02)
    mesh = ProcessMesh((1, 3), ("dp", "ep"))
    for rank in range(3):
        module = Shards(4)
        part = module.get_parameter(name).data
        layouts = parameter_layouts(module, CONFIG, mesh)
        for shard in stored_tensors(layouts, {name: part}, rank).shards:
            initialise(shard.key, shard.tensor, seed=9, std=0.02)
        assert torch.equal(part, whole[rank * 4 : rank * 4 + 4])
    assert 0.015 < float(whole.std()) < 0.025
    assert len({float(v) for v in whole[:, 0, 0]}) == 12


def test_norms_begin_at_one() -> None:
    weight = torch.zeros(3)
    initialise("model.layers.0.self_attn.q_norm.weight", weight, seed=0, std=0.02)
    assert weight.tolist() == [1, 1, 1]


def test_a_tensor_of_another_shape_is_refused() -> None:
    layouts = single_rank_layouts(whole_stage(), CONFIG)
    with pytest.raises(ValueError, match=r"\(3,\).*\(8,\)"):
        stored_tensors(layouts, {"model.norm.weight": torch.zeros(3)}, 0)


def test_only_experts_are_sharded_over_ep() -> None:
    assert is_expert("model.layers.0.mlp.experts.down_proj")
    assert not is_expert("model.layers.0.mlp.gate.weight")
