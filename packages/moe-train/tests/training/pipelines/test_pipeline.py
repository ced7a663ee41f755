from collections.abc import Iterator
from itertools import combinations, pairwise
from random import Random

import pytest
import torch

from moe_train.model import DecoderConfig, DecoderStage, StageOptions
from moe_train.training.pipelines.pipeline import LayerWork, layer_work, split_layers

SIZES = {
    "model_type": "mixtral",
    "vocab_size": 100,
    "hidden_size": 16,
    "intermediate_size": 8,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "eos_token_id": 0,
}


def all_splits(count: int, stages: int) -> Iterator[list[range]]:
    for inner in combinations(range(1, count), stages - 1):
        ends = [0, *inner, count]
        yield [range(a, b) for a, b in pairwise(ends)]


def costs(work: LayerWork, split: list[range]) -> list[float]:
    found = [sum(work.layers[layer] for layer in layers) for layers in split]
    return [*found[:-1], found[-1] + work.behind]


def test_no_split_has_a_cheaper_dearest_stage(seed: int) -> None:
    random = Random(seed)
    for _ in range(20):
        count = random.randint(1, 8)
        work = LayerWork(
            layers=tuple(float(random.randint(1, 9)) for _ in range(count)),
            behind=float(random.randint(0, 20)),
        )
        stages = random.randint(1, count)
        found = split_layers(work, stages)
        assert [layer for layers in found for layer in layers] == list(range(count))
        assert len(found) == stages and all(found)
        best = min(max(costs(work, other)) for other in all_splits(count, stages))
        assert max(costs(work, found)) == best


def test_equal_layers_without_anything_behind_are_split_equally() -> None:
    work = LayerWork(layers=(1.0,) * 8, behind=0.0)
    assert split_layers(work, 4) == [range(0, 2), range(2, 4), range(4, 6), range(6, 8)]


def test_work_is_the_products_of_active_weights_attention_and_head() -> None:
    config = DecoderConfig.from_dict(SIZES)
    work = layer_work(config, 32)
    attention = 16 * 16 + 2 * 16 * 8 + 16 * 16
    experts = 2 * 3 * 16 * 8 + 16 * 4  # two of four, and the router
    assert work.layers == pytest.approx([attention + experts + 2 * 16 * 16] * 4)
    assert work.behind == 100 * 16
    options = StageOptions(layers=range(4), first=True, last=True, device=torch.device("meta"))
    total = sum(p.numel() for p in DecoderStage(config, options).parameters())
    assert sum(work.layers) < total
