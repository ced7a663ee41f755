"""Routing decisions are plain tensors: safetensors saves them, another process replays them."""

from pathlib import Path

import safetensors.torch
import torch
from torch import nn

from moe_pipeline import MoEConfig, MoELayer
from moe_pipeline.layer import record_routing, replay_routing


def test_a_saved_record_is_replayed_by_another_model(seed: int, tmp_path: Path) -> None:
    config = MoEConfig(hidden_size=8, moe_intermediate_size=4, num_experts=6, num_experts_per_tok=2)
    one, other = (nn.ModuleDict({"mlp": MoELayer(config)}) for _ in range(2))
    x = torch.randn(40, 8)
    with record_routing(one) as choices:
        one["mlp"](x)
    safetensors.torch.save_file(choices, tmp_path / "choices.safetensors")
    loaded = safetensors.torch.load_file(tmp_path / "choices.safetensors")
    assert not torch.equal(other["mlp"](x).topk_idx_TK, choices["mlp.0"])
    with replay_routing(other, loaded):
        assert torch.equal(other["mlp"](x).topk_idx_TK, choices["mlp.0"])
