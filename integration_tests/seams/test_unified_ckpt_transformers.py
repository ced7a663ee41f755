"""unified-ckpt against transformers: what either writes, the other reads, under any layout.

The parameters in memory are transformers' own, experts fused; stored tensors are views of them.
Real ranks hold random boxes of these.
"""

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ranktest import run_ranks
from unified_ckpt import Shard, load, save, verify_checkpoint
from unified_ckpt.geometry import Box
from unified_ckpt.options import LoadOptions, SaveOptions
from unified_ckpt.state import find_tied_keys

transformers = pytest.importorskip("transformers", reason="the oracle needs transformers")

SIZES = {
    "vocab_size": 48, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
MODELS = {
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SIZES, moe_intermediate_size=12, head_dim=8, num_experts=6, num_experts_per_tok=2
    ),
    "mixtral": lambda: transformers.MixtralConfig(
        **SIZES, num_local_experts=4, num_experts_per_tok=2
    ),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True),
}


def make_model(family: str) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_config(MODELS[family]()).to(torch.bfloat16)


# Names on disk of the parts of fused experts, in the order of their rows, and of the MoE block.
ON_DISK = {
    "qwen3_moe": ("mlp", {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}),
    "mixtral": ("block_sparse_moe", {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}),
    "qwen3": ("mlp", {}),
}


def stored_views(family: str, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every stored tensor of a model as a view of its parameters in memory."""
    block, fused_parts = ON_DISK[family]
    views: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        prefix, _, fused = name.partition(".mlp.experts.")
        if fused not in fused_parts:
            views[name.replace(".mlp.gate.", f".{block}.gate.")] = tensor
            continue
        for expert in range(len(tensor)):
            rows = tensor[expert].chunk(len(fused_parts[fused]))
            for part, view in zip(fused_parts[fused], rows, strict=True):
                views[f"{prefix}.{block}.experts.{expert}.{part}.weight"] = view
    return views


def random_boxes(rng: random.Random, shape: tuple[int, ...], world_size: int) -> list[Box | None]:
    """One box per rank; together they tile the tensor: rows, columns, flat, owner, replicas."""
    whole = Box.whole(shape)
    kind = rng.choice(["replica", "dim", "flat", "owner"])
    owner, dim = rng.randrange(world_size), rng.randrange(len(shape))
    boxes: list[Box | None] = []
    for rank in range(world_size):
        if kind == "dim":
            boxes.append(whole.chunk(dim, num=world_size, index=rank))
        elif kind == "flat":
            boxes.append(whole.flat_chunk(num=world_size, index=rank))
        else:
            boxes.append(whole if kind == "replica" or rank == owner else None)
    return boxes


def shards_of(
    views: dict[str, torch.Tensor], seed: int, rank: int, world_size: int, *, copy: bool
) -> list[Shard]:
    rng = random.Random(seed)
    shards = []
    for key in sorted(views):
        box = random_boxes(rng, tuple(views[key].shape), world_size)[rank]
        if box is None:
            continue
        slices = tuple(slice(o, o + n) for o, n in zip(box.offset, box.local_shape, strict=True))
        held = views[key][slices]
        if box.flattened_range is not None:
            held = held.reshape(-1)[slice(*box.flattened_range)]
        shards.append(Shard(key=key, tensor=held.clone() if copy else held * 0, box=box))
    return shards


@pytest.mark.parametrize("family", MODELS)
def test_transformers_opens_a_directory_saved_from_any_layout(family: str, tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    model = make_model(family)
    state = model.state_dict()
    tied = find_tied_keys(state)
    assert bool(tied) == (family == "qwen3")
    views = stored_views(family, state)
    config = json.dumps(model.config.to_dict()).encode()

    for world_size in (1, 3):
        target = tmp_path / f"{world_size}"

        def saves(rank: int, world_size: int, target: Path = target) -> None:
            shards = shards_of(views, seed, rank, world_size, copy=True)
            options = SaveOptions(tied=tied, max_shard_bytes=30_000)
            save(
                {"model": shards},
                checkpoint_id=target,
                files={"config.json": config},
                options=options,
            )

        run_ranks(saves, world_size)
        assert verify_checkpoint(target).problems == (), seed
        opened, report = transformers.AutoModelForCausalLM.from_pretrained(
            target, dtype=torch.bfloat16, output_loading_info=True
        )
        assert not any(report[name] for name in report), (seed, report)
        found = opened.state_dict()
        assert found.keys() == state.keys()
        for key, tensor in state.items():
            assert torch.equal(found[key], tensor), (seed, key)


@pytest.mark.parametrize("family", MODELS)
def test_a_save_pretrained_directory_loads_under_any_layout(family: str, tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    model = make_model(family)
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    state = model.state_dict()
    tied = find_tied_keys(state)
    views = stored_views(family, state)
    on_disk = {k: v for path in tmp_path.glob("*.safetensors") for k, v in load_file(path).items()}
    assert set(on_disk) == set(views) - set(tied)

    def loads(rank: int, world_size: int) -> None:
        wants = shards_of(views, seed, rank, world_size, copy=False)
        expected = shards_of(views, seed, rank, world_size, copy=True)
        load(wants, checkpoint_id=tmp_path, options=LoadOptions(tied=tied))
        for want, truth in zip(wants, expected, strict=True):
            assert torch.equal(want.tensor, truth.tensor), (seed, want.key)

    for world_size in (1, 2, 3):
        run_ranks(loads, world_size)
