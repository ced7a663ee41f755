import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from weight_convert.errors import WeightConvertError
from weight_convert.files import read_header
from weight_convert.merging import MergeConfig, MergeModel, Slice, merge
from weight_convert.plan import ConversionOptions
from weight_convert.run import OutputOptions, convert

EXPERTS = 11


def model(folder: Path, seed: int, *, layers=3, more=None) -> dict:
    torch.manual_seed(seed)
    tensors = {"model.embed_tokens.weight": torch.randn(5, 6), "lm_head.weight": torch.randn(5, 6)}
    for n in range(layers):
        prefix = f"model.layers.{n}"
        tensors[f"{prefix}.self_attn.q_proj.weight"] = torch.randn(4, 6)
        tensors[f"{prefix}.mlp.gate.weight"] = torch.randn(EXPERTS, 6)
        for e in range(EXPERTS):
            for part, shape in (("gate", (3, 6)), ("up", (3, 6)), ("down", (6, 3))):
                tensors[f"{prefix}.mlp.experts.{e}.{part}_proj.weight"] = torch.randn(shape)
    tensors = {key: value.bfloat16() for key, value in tensors.items()} | (more or {})
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {"model_type": "qwen3_moe", "num_experts": EXPERTS, "num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


def read(folder: Path) -> dict:
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def pair(tmp_path: Path, **options) -> tuple[dict, dict, tuple[MergeModel, MergeModel]]:
    a, b = model(tmp_path / "a", 1), model(tmp_path / "b", 2)
    return a, b, tuple(MergeModel(path=str(tmp_path / name), **options) for name in "ab")


def test_a_linear_merge_equals_the_float32_sum_whatever_the_files_and_formats(tmp_path) -> None:
    a, b = model(tmp_path / "a", 1), model(tmp_path / "b", 2)
    convert(tmp_path / "b", tmp_path / "fused", to="fused")
    weights = random.random() + 0.1, random.random() + 0.1
    models = tuple(
        MergeModel(path=str(tmp_path / name), weight=weight)
        for name, weight in zip(("a", "fused"), weights, strict=True)
    )
    config = MergeConfig(method="linear", models=models)
    dry = merge(config, tmp_path / "c", options=OutputOptions(max_shard_bytes=900, dry_run=True))
    done = merge(config, tmp_path / "c", options=OutputOptions(max_shard_bytes=900))
    files = {path.name: path.stat().st_size for path in (tmp_path / "c").iterdir()}
    assert dict(dry.files) == dict(done.files) == files and len(files) > 4
    found, total = read(tmp_path / "c"), sum(weights)
    assert found.keys() == a.keys()
    for key in a:
        expected = a[key].float() * (weights[0] / total) + b[key].float() * (weights[1] / total)
        assert torch.equal(found[key], expected.bfloat16()), key


def test_weights_go_from_layer_to_layer_and_by_pattern(tmp_path) -> None:
    a, b, _ = pair(tmp_path)
    by_layer = MergeModel(path=str(tmp_path / "a"), weight=(1.0, 0.0, 0.5))
    by_name = MergeModel(path=str(tmp_path / "b"), weight={"*.mlp.*": 0.25, "*": 0.0})
    config = MergeConfig(
        method="linear", models=(by_layer, by_name), normalize=False, dtype="float32"
    )
    merge(config, tmp_path / "c")
    found = read(tmp_path / "c")
    for layer, weight in ((0, 1.0), (1, 0.0), (2, 0.5)):
        key = f"model.layers.{layer}.self_attn.q_proj.weight"
        assert torch.equal(found[key], a[key].float() * weight)
        key = f"model.layers.{layer}.mlp.gate.weight"
        assert torch.equal(found[key], a[key].float() * weight + b[key].float() * 0.25)
    assert torch.equal(found["model.embed_tokens.weight"], a["model.embed_tokens.weight"].float())
    assert torch.equal(found["lm_head.weight"], a["lm_head.weight"].float() * 0.5)
    assert json.loads((tmp_path / "c" / "config.json").read_text())["dtype"] == "float32"
    none = MergeModel(path=str(tmp_path / "b"), weight={"*.mlp.*": 0.25})
    with pytest.raises(WeightConvertError, match=r"no pattern of weight of .*b matches lm_head"):
        merge(MergeConfig(method="linear", models=(by_layer, none)), tmp_path / "d")


@pytest.mark.parametrize("method", ["task_arithmetic", "ties", "dare_ties", "della", "breadcrumbs"])
def test_a_merge_with_a_base_is_the_same_every_time_and_the_base_where_nothing_differs(
    tmp_path, method
) -> None:
    base, _, models = pair(tmp_path, **({} if method == "task_arithmetic" else {"density": 0.5}))
    seed = {"seed": 7} if method in ("dare_ties", "della") else {}
    config = MergeConfig(method=method, base=str(tmp_path / "a"), models=models, **seed)
    merge(config, tmp_path / "c")
    merge(config, tmp_path / "d")
    c, d = read(tmp_path / "c"), read(tmp_path / "d")
    assert all(torch.equal(c[key], d[key]) for key in base)
    assert any(not torch.equal(c[key], base[key]) for key in base)
    alone = MergeConfig(method=method, base=str(tmp_path / "a"), models=models[:1])
    merge(alone, tmp_path / "e")
    found = read(tmp_path / "e")
    assert all(torch.equal(found[key], base[key]) for key in base)


def test_removed_tensors_are_gone_and_counted_and_a_pattern_without_any_fails(tmp_path) -> None:
    more = {"model.mtp.x": torch.zeros(3, 4)}
    a = model(tmp_path / "a", 1, more=more)
    model(tmp_path / "b", 2)
    models = tuple(MergeModel(path=str(tmp_path / name)) for name in "ab")
    config = MergeConfig(method="linear", models=models, remove_keys=("model.mtp.*", "lm_head.*"))
    report = merge(config, tmp_path / "c")
    assert read(tmp_path / "c").keys() == a.keys() - {"model.mtp.x", "lm_head.weight"}
    assert report.removed_keys == ("lm_head.weight", "model.mtp.x")
    assert report.removed_bytes == 3 * 4 * 4 + 5 * 6 * 2
    whole = sum(value.nbytes for value in a.values())
    assert report.data_bytes == whole - report.removed_bytes
    with pytest.raises(WeightConvertError, match=r"remove_keys: 'x\*' matches no tensor"):
        merge(MergeConfig(method="linear", models=models, remove_keys=("x*",)), tmp_path / "d")
    with pytest.raises(WeightConvertError, match=r"model\.mtp\.x is in .*a only"):
        merge(MergeConfig(method="linear", models=models), tmp_path / "d")
    assert not (tmp_path / "d").exists()


def test_layers_are_stacked_without_a_changed_byte(tmp_path) -> None:
    a, b, _ = pair(tmp_path)
    slices = (
        Slice(path=str(tmp_path / "a"), begin=0, end=2),
        Slice(path=str(tmp_path / "b"), begin=1, end=3),
    )
    report = merge(MergeConfig(method="passthrough", slices=slices), tmp_path / "c")
    found = read(tmp_path / "c")
    assert report.num_computed == 0
    for layer, (source, old) in enumerate(((a, 0), (a, 1), (b, 1), (b, 2))):
        for key in (k for k in source if k.startswith(f"model.layers.{old}.")):
            new = key.replace(f"layers.{old}.", f"layers.{layer}.")
            assert torch.equal(found.pop(new), source[key])
    assert found.keys() == {"model.embed_tokens.weight", "lm_head.weight"}
    assert torch.equal(found["lm_head.weight"], a["lm_head.weight"])
    assert json.loads((tmp_path / "c" / "config.json").read_text())["num_hidden_layers"] == 4
    wrong = (Slice(path=str(tmp_path / "a"), begin=2, end=4),)
    with pytest.raises(WeightConvertError, match="has no layer 3"):
        merge(MergeConfig(method="passthrough", slices=wrong), tmp_path / "d")


def test_models_that_do_not_fit_are_named(tmp_path) -> None:
    _, _, models = pair(tmp_path)
    key = "model.layers.0.self_attn.q_proj.weight"
    b = load_file(tmp_path / "b" / "model.safetensors")
    for changed, message in (
        (torch.zeros(4, 5), r"q_proj.weight has shape \[4, 5\] in .*b, but \[4, 6\] in .*a"),
        (torch.zeros(4, 6, dtype=torch.float8_e4m3fn), "is quantised; dequantise"),
        (torch.zeros(4, 6, dtype=torch.int32), "is I32 in .*b, but BF16 in .*a"),
    ):
        save_file(b | {key: changed}, tmp_path / "b" / "model.safetensors")
        with pytest.raises(WeightConvertError, match=message):
            merge(MergeConfig(method="linear", models=models), tmp_path / "c")
    (tmp_path / "b" / "config.json").write_text('{"model_type": "mixtral"}')
    with pytest.raises(WeightConvertError, match="is of model_type 'mixtral', but"):
        merge(MergeConfig(method="linear", models=models), tmp_path / "c")


def test_layers_that_are_stacked_get_the_dtype_and_the_lists_of_their_config(tmp_path) -> None:
    a, _, _ = pair(tmp_path)
    path = tmp_path / "a" / "config.json"
    config = json.loads(path.read_text()) | {"layer_types": ["x", "y", "z"]}
    path.write_text(json.dumps(config))
    slices = tuple(Slice(path=str(tmp_path / "a"), begin=b, end=b + 2) for b in (0, 1))
    merge(MergeConfig(method="passthrough", slices=slices, dtype="float32"), tmp_path / "c")
    found = read(tmp_path / "c")
    assert {value.dtype for value in found.values()} == {torch.float32}
    key = "model.layers.{}.self_attn.q_proj.weight"
    assert torch.equal(found[key.format(3)], a[key.format(2)].float())
    config = json.loads((tmp_path / "c" / "config.json").read_text())
    assert (config["dtype"], config["layer_types"]) == ("float32", ["x", "y", "y", "z"])


@pytest.mark.parametrize("method", ["linear", "passthrough"])
def test_a_router_s_buffer_keeps_its_dtype_whatever_that_of_the_output(tmp_path, method) -> None:
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    tensors = {bias: torch.rand(4), "model.layers.1.mlp.gate.weight": torch.rand(4, 6)}
    (tmp_path / "a").mkdir()
    save_file(tensors, tmp_path / "a" / "model.safetensors")
    (tmp_path / "a" / "config.json").write_text('{"model_type": "deepseek_v3"}')
    path = str(tmp_path / "a")
    parts = (
        {"models": (MergeModel(path=path),)}
        if method == "linear"
        else {"slices": (Slice(path=path, begin=1, end=2),)}
    )
    merge(MergeConfig(method=method, dtype="bfloat16", **parts), tmp_path / "b")
    found = {key.rpartition(".")[2]: value for key, value in read(tmp_path / "b").items()}
    assert torch.equal(found["e_score_correction_bias"], tensors[bias])
    assert found["weight"].dtype == torch.bfloat16


def test_what_is_made_of_torch_s_files_says_its_format_as_transformers_wants_it(tmp_path) -> None:
    model(tmp_path / "a", 1)
    convert(
        tmp_path / "a", tmp_path / "b", to="transformers", options=ConversionOptions(files="bin")
    )
    models = (MergeModel(path=str(tmp_path / "b")),)
    merge(MergeConfig(method="linear", models=models), tmp_path / "c")
    assert read_header(tmp_path / "c" / "model.safetensors").metadata == {"format": "pt"}
