import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from weight_convert.adapters import lora
from weight_convert.compute import lowrank
from weight_convert.errors import WeightConvertError
from weight_convert.run import OutputOptions

E, H, WIDTH, R = 11, 8, 6, 3
Q = "model.layers.0.self_attn.q_proj"
EXPERTS = "model.layers.0.mlp.experts"


def write(folder: Path, tensors: dict, config: dict) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def adapter(folder: Path, tensors: dict, **config) -> Path:
    folder.mkdir()
    named = {f"base_model.model.{key}": value for key, value in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": R, "lora_alpha": 5, **config}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def factors(out: int, into: int, rank: int = R) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rank, into), torch.randn(out, rank)


@pytest.mark.parametrize("chunk", [1, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["lora", "rslora", "dora"])
def test_dense_weights_get_their_update(tmp_path, monkeypatch, chunk, dtype, kind) -> None:
    monkeypatch.setattr(lowrank, "CHUNK_ELEMENTS", chunk)
    weight, other = torch.randn(10, H).to(dtype), torch.randn(4).to(dtype)
    model = {f"{Q}.weight": weight, "model.norm.weight": other}
    write(tmp_path / "a", model, {"model_type": "qwen3_moe"})
    a, b = factors(10, H)
    tensors = {f"{Q}.lora_A.weight": a, f"{Q}.lora_B.weight": b}
    update = (b @ a) * (5 / math.sqrt(R) if kind == "rslora" else 5 / R)
    expected = weight.float() + update
    if kind == "dora":
        magnitude = torch.rand(10) + 0.5
        tensors[f"{Q}.lora_magnitude_vector"] = magnitude
        norms = torch.linalg.norm(expected, dim=1)
        expected = (magnitude / norms)[:, None] * expected
    options = {"use_rslora": kind == "rslora", "use_dora": kind == "dora"}
    adapter(tmp_path / "lora", tensors, **options)
    report = lora(tmp_path / "a", tmp_path / "lora", tmp_path / "b")
    found = load_file(tmp_path / "b" / "model.safetensors")
    tolerance = 2**-8 if dtype == torch.bfloat16 else 1e-5
    assert torch.allclose(
        found[f"{Q}.weight"].float(), expected.to(dtype).float(), rtol=tolerance, atol=tolerance
    )
    assert torch.equal(found["model.norm.weight"], other) and report.num_computed == 1


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("width", [WIDTH, H // 2])  # with the second, gate_up is square
def test_fused_experts_get_theirs_each_by_its_own_factors(tmp_path, family, width) -> None:
    shapes = {"gate_up_proj": (2 * width, H), "down_proj": (H, width)}
    names = ("gate_up_proj", "down_proj")
    model, tensors, expected = {}, {}, {}
    for inner, name in (("", names[0]), (".base_layer", names[1])):
        out, into = shapes[name]
        a = torch.randn(E, R, into)
        b = torch.randn(E, out, R)
        stored = (E, out, into) if family == "qwen3_moe" else (E, into, out)
        model[f"{EXPERTS}.{name}"] = torch.randn(stored)
        prefix = f"{EXPERTS}{inner}"
        tensors[f"{prefix}.lora_A.weight"] = a.reshape(E * R, into)
        tensors[f"{prefix}.lora_B.weight"] = b.permute(1, 2, 0).reshape(out, R * E)
        update = torch.stack([b[e] @ a[e] for e in range(E)]) * (5 / R)
        update = update if family == "qwen3_moe" else update.transpose(1, 2)
        expected[f"{EXPERTS}.{name}"] = model[f"{EXPERTS}.{name}"] + update
    write(tmp_path / "a", model, {"model_type": family})
    adapter(tmp_path / "lora", tensors)
    lora(tmp_path / "a", tmp_path / "lora", tmp_path / "b")
    found = load_file(tmp_path / "b" / "model.safetensors")
    for key, value in expected.items():
        assert torch.allclose(found[key], value, atol=1e-5), key


def test_single_experts_embeddings_patterns_and_whole_tensors(tmp_path) -> None:
    down = f"{EXPERTS}.10.down_proj"
    embed, head = "model.embed_tokens", "lm_head.weight"
    model = {
        f"{down}.weight": torch.randn(H, WIDTH),
        f"{EXPERTS}.1.down_proj.weight": torch.randn(H, WIDTH),
    }
    model |= {f"{embed}.weight": torch.randn(9, H), head: torch.randn(9, H)}
    write(tmp_path / "a", model, {"model_type": "qwen3_moe"})
    a, b = factors(H, WIDTH, 2)
    ea, eb = torch.randn(R, 9), torch.randn(H, R)
    tensors = {f"{down}.lora_A.weight": a, f"{down}.lora_B.weight": b}
    tensors |= {f"{embed}.lora_embedding_A": ea, f"{embed}.lora_embedding_B": eb}
    tensors[head] = torch.randn(9, H)
    adapter(tmp_path / "lora", tensors, alpha_pattern={"10.down_proj": 3}, rank_pattern={"x": 2})
    lora(
        tmp_path / "a",
        tmp_path / "lora",
        tmp_path / "b",
        options=OutputOptions(max_shard_bytes=300),
    )
    found = {}
    for path in (tmp_path / "b").glob("*.safetensors"):
        found |= load_file(path)
    assert torch.allclose(found[f"{down}.weight"], model[f"{down}.weight"] + b @ a * 1.5, atol=1e-5)
    expected = model[f"{embed}.weight"] + (eb @ ea).T * (5 / R)
    assert torch.allclose(found[f"{embed}.weight"], expected, atol=1e-5)
    assert torch.equal(found[head], tensors[head])
    assert torch.equal(
        found[f"{EXPERTS}.1.down_proj.weight"], model[f"{EXPERTS}.1.down_proj.weight"]
    )


def test_what_fits_no_tensor_or_is_another_variant_is_named(tmp_path) -> None:
    write(tmp_path / "a", {f"{Q}.weight": torch.randn(10, H)}, {"model_type": "qwen3_moe"})
    with pytest.raises(WeightConvertError, match=r"a has no adapter_config\.json; give an adapter"):
        lora(tmp_path / "a", tmp_path / "a", tmp_path / "b")
    a, b = factors(10, H)
    good = {f"{Q}.lora_A.weight": a, f"{Q}.lora_B.weight": b}
    cases = [
        ({"x.lora_A.weight": a, "x.lora_B.weight": b}, {}, "fits no tensor of .*convert --to"),
        ({f"{Q}.lora_A.weight": a}, {}, "has lora_A; expected lora_A and lora_B"),
        (good | {f"{Q}.lora_B.weight": b[:4].clone()}, {}, r"is for \[4, 8\], but .* \[10, 8\]"),
        (good | {"model.y": a.clone()}, {}, "has base_model.model.model.y .*fits no tensor"),
        (good, {"use_dora": True}, "the magnitude of .*q_proj is missing"),
        (good, {"bias": "all"}, "has bias='all', which cannot be merged here"),
        (good, {"peft_type": "IA3"}, "not of peft_type LORA"),
    ]
    for number, (tensors, config, message) in enumerate(cases):
        adapter(tmp_path / f"lora{number}", tensors, **config)
        with pytest.raises(WeightConvertError, match=message):
            lora(tmp_path / "a", tmp_path / f"lora{number}", tmp_path / "b")
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga"])
def test_an_adapter_that_changed_the_model_when_it_began_is_refused(tmp_path, init) -> None:
    write(tmp_path / "a", {f"{Q}.weight": torch.randn(10, H)}, {"model_type": "qwen3_moe"})
    a, b = factors(10, H)
    tensors = {f"{Q}.lora_A.weight": a, f"{Q}.lora_B.weight": b}
    adapter(tmp_path / "lora", tensors, init_lora_weights=init)
    with pytest.raises(WeightConvertError, match=f"init_lora_weights='{init}', which changed the"):
        lora(tmp_path / "a", tmp_path / "lora", tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_a_pattern_of_alpha_is_for_the_names_of_parameters_that_have_factors(tmp_path) -> None:
    up, down, gate = f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj", "model.layers.0.mlp.gate"
    shapes = {up: (E, 2 * WIDTH, H), down: (E, H, WIDTH)}
    model = {key: torch.zeros(shape) for key, shape in shapes.items()}
    model[f"{gate}.weight"] = torch.zeros(E, H)
    write(tmp_path / "a", model, {"model_type": "qwen3_moe"})
    tensors = {
        f"{EXPERTS}.lora_A.weight": torch.ones(E, H),
        f"{EXPERTS}.lora_B.weight": torch.ones(2 * WIDTH, E),
        f"{EXPERTS}.base_layer.lora_A.weight": torch.ones(E, WIDTH),
        f"{EXPERTS}.base_layer.lora_B.weight": torch.ones(H, E),
        f"{gate}.lora_A.weight": torch.ones(1, H),
        f"{gate}.lora_B.weight": torch.ones(E, 1),
    }
    options = {
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "gate.weight"],
        "alpha_pattern": {"experts": 2, "experts.down_proj": 7, "gate.weight": 3, "gate": 4},
    }
    adapter(tmp_path / "lora", tensors, **options)
    lora(tmp_path / "a", tmp_path / "lora", tmp_path / "b")
    found = load_file(tmp_path / "b" / "model.safetensors")
    for key, alpha in ((up, 5), (down, 7), (f"{gate}.weight", 3)):
        assert torch.equal(found[key], torch.full_like(model[key], alpha)), key


def test_an_embedding_that_stands_beside_its_factors_is_what_they_are_added_to(tmp_path) -> None:
    key = "model.embed_tokens"
    write(tmp_path / "a", {f"{key}.weight": torch.zeros(7, H)}, {"model_type": "qwen3_moe"})
    tensors = {
        f"{key}.lora_embedding_A": torch.ones(R, 7),
        f"{key}.lora_embedding_B": torch.ones(H, R),
        f"{key}.base_layer.weight": torch.ones(7, H),
    }
    adapter(tmp_path / "lora", tensors, lora_alpha=1)
    report = lora(tmp_path / "a", tmp_path / "lora", tmp_path / "b")
    found = load_file(tmp_path / "b" / "model.safetensors")
    assert torch.equal(found[f"{key}.weight"], torch.full((7, H), 2.0)) and report.num_tensors == 1
    tensors[f"{key}.base_layer.weight"] = torch.ones(7, H).bfloat16()
    adapter(tmp_path / "other", tensors)
    with pytest.raises(WeightConvertError, match=r"\(BF16 \[7, 8\]\), which fits no tensor"):
        lora(tmp_path / "a", tmp_path / "other", tmp_path / "c")


@pytest.mark.parametrize("replaced", ["model.embed_tokens.weight", "lm_head.weight"])
def test_a_tied_model_whose_embedding_or_head_alone_is_replaced_is_tied_no_more(
    tmp_path, replaced
) -> None:
    former, new = torch.randn(7, H), torch.randn(7, H)
    config = {"model_type": "qwen3_moe", "tie_word_embeddings": True}
    write(tmp_path / "a", {"model.embed_tokens.weight": former}, config)
    adapter(tmp_path / "lora", {replaced: new})
    lora(tmp_path / "a", tmp_path / "lora", tmp_path / "b")
    found = load_file(tmp_path / "b" / "model.safetensors")
    assert found.keys() == {"model.embed_tokens.weight", "lm_head.weight"}
    assert all(torch.equal(found[k], new if k == replaced else former) for k in found)
    assert not json.loads((tmp_path / "b" / "config.json").read_text())["tie_word_embeddings"]
    both = {"model.embed_tokens.weight": new, "lm_head.weight": new.clone()}
    adapter(tmp_path / "as one", both, ensure_weight_tying=True)
    lora(tmp_path / "a", tmp_path / "as one", tmp_path / "c")
    found = load_file(tmp_path / "c" / "model.safetensors")
    assert found.keys() == {"model.embed_tokens.weight"} and torch.equal(*found.values(), new)
    assert json.loads((tmp_path / "c" / "config.json").read_text()) == config


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"lora_alpha": None}, "has None in lora_alpha; expected a finite number"),
        ({"lora_alpha": "x"}, "has 'x' in lora_alpha"),
        ({"lora_alpha": float("nan")}, "has nan in lora_alpha"),
        ({"alpha_pattern": [1]}, r"has \[1\] in alpha_pattern; expected numbers by pattern"),
        ({"alpha_pattern": {"q_proj": None}}, "has None in alpha_pattern; expected a finite"),
        ({"alpha_pattern": {"(": 3}}, r"has '\(' in alpha_pattern; expected regular expressions"),
        ({"target_parameters": 3}, "has 3 in target_parameters; expected a list of names"),
        ({"target_parameters": "ab"}, "has 'ab' in target_parameters"),
    ],
)
def test_a_value_of_the_adapter_s_config_that_is_none_is_named(tmp_path, config, said) -> None:
    write(tmp_path / "a", {f"{Q}.weight": torch.randn(10, H)}, {"model_type": "qwen3_moe"})
    a, b = factors(10, H)
    tensors = {f"{Q}.lora_A.weight": a, f"{Q}.lora_B.weight": b}
    adapter(tmp_path / "lora", tensors, **config)
    with pytest.raises(WeightConvertError, match=f"adapter_config.json {said}"):
        lora(tmp_path / "a", tmp_path / "lora", tmp_path / "b")


@pytest.mark.parametrize(
    ("shape_a", "shape_b"),
    [((H,), (10, R)), ((R, H), ()), ((2, H), (10, 3)), ((0, H), (10, 0)), ((R, H, 1, 1), (10, R))],
)
def test_factors_that_make_no_product_are_refused(tmp_path, shape_a, shape_b) -> None:
    write(tmp_path / "a", {f"{Q}.weight": torch.randn(10, H)}, {"model_type": "qwen3_moe"})
    tensors = {f"{Q}.lora_A.weight": torch.ones(shape_a), f"{Q}.lora_B.weight": torch.ones(shape_b)}
    adapter(tmp_path / "lora", tensors)
    with pytest.raises(WeightConvertError, match=r"expected \[rank, in\] and \[out, rank\] of one"):
        lora(tmp_path / "a", tmp_path / "lora", tmp_path / "b")


@pytest.mark.parametrize("count", [1, 7, 9, 16])
def test_a_magnitude_of_another_length_is_refused(tmp_path, count) -> None:
    model = write(tmp_path / "m", {f"{Q}.weight": torch.randn(8, H)}, {"model_type": "qwen3_moe"})
    a, b = factors(8, H)
    tensors = {f"{Q}.lora_A.weight": a, f"{Q}.lora_B.weight": b}
    tensors[f"{Q}.lora_magnitude_vector"] = torch.rand(count)
    lora_folder = adapter(tmp_path / "l", tensors, use_dora=True)
    with pytest.raises(WeightConvertError, match=rf"shape \[{count}\]; expected 8 numbers"):
        lora(model, lora_folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_embedding_with_dora_is_refused(tmp_path) -> None:
    name = "model.embed_tokens"
    model = write(tmp_path / "m", {f"{name}.weight": torch.randn(9, H)}, {"model_type": "olmoe"})
    tensors = {f"{name}.lora_embedding_A": torch.randn(R, 9)}
    tensors[f"{name}.lora_embedding_B"] = torch.randn(H, R)
    tensors[f"{name}.lora_magnitude_vector"] = torch.rand(H)
    lora_folder = adapter(tmp_path / "l", tensors, use_dora=True)
    with pytest.raises(WeightConvertError, match=r"embed_tokens is an embedding with DoRA"):
        lora(model, lora_folder, tmp_path / "out")
