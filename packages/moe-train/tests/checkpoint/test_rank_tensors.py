import torch
from torch import Tensor

from moe_train.checkpoint.rank_tensors import RankTensors
from moe_train.layout import single_rank_layouts, stage_tensors
from moe_train.model.config import DecoderConfig
from moe_train.model.stage import DecoderStage, StageOptions
from unified_ckpt import Shard

VALUES = {
    "vocab_size": 20,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 6,
    "intermediate_size": 6,
    "sliding_window": 2,
}
DOWN = "model.layers.0.mlp.experts.down_proj"


def rank_tensors(family: str) -> tuple[RankTensors, dict[str, Tensor]]:
    config = DecoderConfig.from_dict({**VALUES, "model_type": family, "num_local_experts": 4})
    stage = DecoderStage(config, StageOptions(layers=range(1), first=True, last=True))
    layouts, tensors = single_rank_layouts(stage, config), stage_tensors(stage)
    for tensor in tensors.values():
        tensor.copy_(torch.randn(tensor.shape))
    mine = RankTensors(rank=0, parameters=tensors, layouts=layouts, layouts_of_updates=layouts)
    return mine, tensors


def values(shards: list[Shard]) -> dict[str, Tensor]:
    return {shard.key: shard.tensor.clone() for shard in shards}


def test_views_are_made_once_for_weights_and_each_moment() -> None:
    mine, tensors = rank_tensors("qwen3_moe")
    moments = {name: tensor.clone() for name, tensor in tensors.items()}
    first = mine.weights(tensors), mine.updates(moments, "/m"), mine.updates(tensors, "/v")
    again = mine.weights(tensors), mine.updates(moments, "/m"), mine.updates(tensors, "/v")
    for one, other in zip(first, again, strict=True):
        assert all(a is b for a, b in zip(one.shards, other.shards, strict=True))
    keys = [{shard.key.partition("/")[2] for shard in each.shards} for each in again]
    assert keys == [{""}, {"m"}, {"v"}]
    tensors[DOWN].fill_(3.0)
    (down,) = [
        s for s in mine.weights(tensors).shards if s.key.endswith("experts.2.down_proj.weight")
    ]
    assert bool((down.tensor == 3.0).all())


def test_tensors_in_other_memory_get_views_of_it() -> None:
    mine, tensors = rank_tensors("qwen3_moe")
    before = values(mine.weights(tensors).shards)
    tensors[DOWN].data = tensors[DOWN] + 1.0
    after = values(mine.weights(tensors).shards)
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert changed == {key for key in before if "down_proj" in key}
    some = {DOWN: tensors[DOWN]}
    assert {shard.key for shard in mine.weights(some).shards} == changed


def test_copies_in_another_layout_are_of_the_values_at_each_call() -> None:
    mine, tensors = rank_tensors("gpt_oss")
    assert mine.weights(tensors).rearranged
    before = values(mine.weights(tensors).shards)
    for tensor in tensors.values():
        tensor.mul_(2.0)
    for key, value in values(mine.weights(tensors).shards).items():
        assert torch.equal(value, before[key] * 2.0), key
