"""Dense models made MoE ones: transformers loads them, and they compute what the dense ones do."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from weight_convert.cli import main
from weight_convert.errors import WeightConvertError
from weight_convert.upcycling import Upcycling, upcycle

transformers = pytest.importorskip("transformers", reason="the oracle needs transformers")

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "intermediate_size": 48,
    "head_dim": 16,
    "initializer_range": 0.2,
}


def dense(model_type: str, folder: Path) -> Any:
    seed = random.randrange(2**31)
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(model_type, **SIZES)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder)
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(20)[None]).logits


@pytest.mark.parametrize(("top_k", "shards"), [(2, 1), (4, 4), (6, 3)])
@pytest.mark.parametrize("model_type", ["qwen3", "llama", "mistral"])
def test_transformers_computes_with_the_experts_what_the_dense_model_does(
    model_type: str, top_k: int, shards: int, tmp_path: Path
) -> None:
    model = dense(model_type, tmp_path / "dense")
    how = ["--experts", "12", "--top-k", str(top_k), "--shards", str(shards)]
    assert main(["upcycle", str(tmp_path / "dense"), str(tmp_path / "moe"), *how]) == 0
    moe, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "moe", output_loading_info=True, dtype=torch.float32
    )
    assert type(moe).__name__ == {"qwen3": "Qwen3MoeForCausalLM"}.get(
        model_type, "MixtralForCausalLM"
    )
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    torch.testing.assert_close(logits(moe.eval()), logits(model), rtol=1e-4, atol=1e-5)
    routers = [t for key, t in moe.state_dict().items() if key.endswith("mlp.gate.weight")]
    for router in routers:
        assert len(router.unique(dim=0)) == 12 // shards
        assert 0.015 < router.std() < 0.025
    assert not torch.equal(*routers)


def test_a_seed_gives_the_same_files_and_another_one_other_routers_alone(tmp_path: Path) -> None:
    dense("qwen3", tmp_path / "dense")
    files = []
    for number, seed in enumerate((1, 1, 2)):
        how = Upcycling(num_experts=4, num_experts_per_tok=2, num_shards=2, seed=seed)
        upcycle(tmp_path / "dense", tmp_path / str(number), how)
        files.append(load_file(tmp_path / str(number) / "model.safetensors"))
    same, again, other = files
    assert same.keys() == again.keys() == other.keys()
    assert all(torch.equal(same[key], again[key]) for key in same)
    changed = {key for key in same if not torch.equal(same[key], other[key])}
    assert changed == {f"model.layers.{n}.mlp.gate.weight" for n in range(2)}


def test_what_cannot_become_experts_is_refused_by_name(tmp_path: Path) -> None:
    dense("qwen3", tmp_path / "dense")
    for values, message in (
        ({"num_experts": 4, "num_experts_per_tok": 5}, "5 of 4 experts"),
        ({"num_experts": 5, "num_experts_per_tok": 2, "num_shards": 2}, "num_experts=5 is no mult"),
        ({"num_experts": 5, "num_experts_per_tok": 5, "num_shards": 5}, "48 units cannot be cut"),
    ):
        with pytest.raises(WeightConvertError, match=message):
            upcycle(tmp_path / "dense", tmp_path / "moe", Upcycling(**values))
    config = tmp_path / "dense" / "config.json"
    text = config.read_text()
    for former, new, message in (
        ('"qwen3"', '"gemma3"', "known dense families: qwen3, mistral, llama"),
        ('"attention_bias": false', '"attention_bias": true', "biases of attention"),
        ('"model_type": "qwen3"', '"model_type": "llama"', "k_norm.weight has no place"),
    ):
        assert former in text
        config.write_text(text.replace(former, new))
        with pytest.raises(WeightConvertError, match=message):
            how = Upcycling(num_experts=4, num_experts_per_tok=2)
            upcycle(tmp_path / "dense", tmp_path / "moe", how)
    assert not (tmp_path / "moe").exists()
