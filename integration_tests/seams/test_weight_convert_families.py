"""Every family of weight-convert against transformers: files, names, shapes, values, logits.

The oracle is `save_pretrained` in both of its formats and `from_pretrained`, on tiny models of
random weights with twelve experts and no square expert.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from weight_convert import ConversionOptions, convert, explain, get_spec, verify
from weight_convert.specs import family_names

transformers = pytest.importorskip("transformers", reason="the oracle needs transformers")
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, FP8Experts  # noqa: E402

MakeModel = Callable[[str], tuple[int, Any]]


def same_files(a: Path, b: Path) -> bool:
    names = sorted(path.name for path in a.iterdir())
    return names == sorted(path.name for path in b.iterdir()) and all(
        (a / name).read_bytes() == (b / name).read_bytes() for name in names
    )


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(10)[None]).logits


def test_the_table_has_every_family(tiny_configs: dict[str, dict[str, Any]]) -> None:
    assert sorted(tiny_configs) == list(family_names())


@pytest.mark.parametrize("model_type", family_names())
def test_files_of_both_formats_are_those_that_transformers_writes(
    model_type: str, make_model: MakeModel, tmp_path: Path
) -> None:
    seed, model = make_model(model_type)
    for limit, max_shard_bytes in (("40KB", 40_000), ("1GB", 10**9)):
        folder = tmp_path / limit
        model.save_pretrained(folder / "disk", max_shard_size=limit)
        model.save_pretrained(folder / "memory", max_shard_size=limit, save_original_format=False)
        for name in ("disk", "memory"):
            found = explain(folder / name)
            assert found.is_whole, (found, seed)
        options = ConversionOptions(max_shard_bytes=max_shard_bytes, unknown="refuse")
        convert(folder / "disk", folder / "fused", to="fused", options=options)
        convert(folder / "fused", folder / "back", to="transformers", options=options)
        assert same_files(folder / "memory", folder / "fused"), seed
        assert same_files(folder / "disk", folder / "back"), seed
        assert verify(folder / "disk", folder / "fused").equal


@pytest.mark.parametrize("model_type", family_names())
def test_transformers_loads_both_formats_with_the_same_values_and_logits(
    model_type: str, make_model: MakeModel, tmp_path: Path
) -> None:
    seed, model = make_model(model_type)
    model.save_pretrained(tmp_path / "disk")
    convert(tmp_path / "disk", tmp_path / "fused", to="fused")
    convert(tmp_path / "fused", tmp_path / "back", to="transformers")
    expected = model.state_dict()
    for name in ("fused", "back"):
        loaded, info = type(model).from_pretrained(
            tmp_path / name, output_loading_info=True, dtype=torch.float32
        )
        assert not info["missing_keys"], (name, seed)
        assert not info["unexpected_keys"], (name, seed)
        found = loaded.state_dict()
        assert all(torch.equal(found[key], tensor) for key, tensor in expected.items()), seed
        torch.testing.assert_close(logits(loaded.eval()), logits(model), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("model_type", family_names())
def test_a_cast_keeps_the_dtype_of_what_transformers_keeps(
    model_type: str, make_model: MakeModel, tmp_path: Path
) -> None:
    seed, model = make_model(model_type)
    model.save_pretrained(tmp_path / "disk")
    options = ConversionOptions(dtype="bfloat16")
    convert(tmp_path / "disk", tmp_path / "cast", to="fused", options=options)
    loaded = type(model).from_pretrained(tmp_path / "disk", dtype=torch.bfloat16)
    buffers = {name for name, _ in loaded.named_buffers()}
    for key, tensor in load_file(tmp_path / "cast" / "model.safetensors").items():
        kept = torch.float32 if key in buffers else loaded.state_dict()[key].dtype
        assert tensor.dtype == kept, (key, seed)


@pytest.mark.parametrize("model_type", family_names())
def test_stored_views_are_the_boxes_that_transformers_writes(
    model_type: str, make_model: MakeModel, tmp_path: Path
) -> None:
    seed, model = make_model(model_type)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    for name, tensor in model.state_dict().items():
        for view in get_spec(model_type).stored_views(name, tuple(tensor.shape)):
            box = tensor
            for dim, (offset, length) in enumerate(zip(view.offset, view.shape, strict=True)):
                box = box.narrow(dim, offset, length)
            stored = saved.pop(view.key, None)
            tied = stored is None and name == "lm_head.weight"
            assert tied or torch.equal(stored, box.reshape(view.stored_shape)), (view.key, seed)
    assert saved == {}


def test_layers_of_multi_token_prediction_and_unknown_tensors_come_back(
    make_model: MakeModel, tmp_path: Path
) -> None:
    _, model = make_model("deepseek_v3")
    model.save_pretrained(tmp_path / "a")
    path = tmp_path / "a" / "model.safetensors"
    tensors = load_file(path)
    names = [name for name in tensors if ".layers.1." in name]
    tensors |= {name.replace("layers.1.", "layers.2."): tensors[name] + 1 for name in names}
    tensors["model.layers.2.eh_proj.weight"] = torch.randn(32, 64)
    tensors["model.layers.2.shared_head.norm.weight"] = torch.randn(32)
    tensors["model.unheard_of"] = torch.tensor([float("nan"), -0.0])
    save_file(tensors, path, metadata={"format": "pt"})
    assert explain(tmp_path / "a").unknown == ("model.unheard_of",)
    report = convert(tmp_path / "a", tmp_path / "b", to="fused")
    assert report.unknown_keys == ("model.unheard_of",)
    assert "model.layers.2.mlp.experts.gate_up_proj" in load_file(tmp_path / "b" / path.name)
    convert(tmp_path / "b", tmp_path / "c", to="transformers")
    assert (tmp_path / "c" / path.name).read_bytes() == path.read_bytes()


def fp8_of(weight: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight as e4m3 in square blocks, and its scales."""
    rows, columns = weight.shape[0] // block, weight.shape[1] // block
    blocks = weight.float().reshape(rows, block, columns, block)
    scales = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    return codes.reshape(weight.shape), scales


def test_scales_of_fp8_experts_are_fused_as_transformers_holds_them(
    tiny_configs: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    torch.manual_seed(seed := random.randrange(2**32))
    config = transformers.Qwen3MoeConfig(
        **(tiny_configs["qwen3_moe"] | {"hidden_size": 64, "moe_intermediate_size": 32})
    )
    model = transformers.Qwen3MoeForCausalLM(config)
    model.config.quantization_config = {
        "quant_method": "fp8",
        "weight_block_size": [16, 16],
        "activation_scheme": "dynamic",
        "modules_to_not_convert": ["self_attn", "layers.0.mlp", "lm_head", "mlp.gate"],
    }
    model.config.save_pretrained(tmp_path / "a")
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        for view in get_spec("qwen3_moe").stored_views(name, tuple(tensor.shape)):
            box = tensor
            for dim, (offset, length) in enumerate(zip(view.offset, view.shape, strict=True)):
                box = box.narrow(dim, offset, length)
            stored[view.key] = box.reshape(view.stored_shape).clone()
            if ".experts." in view.key:
                codes, scales = fp8_of(stored[view.key], 16)
                stored[view.key], stored[f"{view.key}_scale_inv"] = codes, scales
    path = tmp_path / "a" / "model.safetensors"
    save_file(stored, path, metadata={"format": "pt"})
    report = convert(tmp_path / "a", tmp_path / "b", to="fused")
    assert report.unknown_keys == ()
    fused = load_file(tmp_path / "b" / path.name)
    codes = fused["model.layers.1.mlp.experts.gate_up_proj"]
    scales = fused["model.layers.1.mlp.experts.gate_up_proj_scale_inv"]
    assert (codes.dtype, scales.shape) == (torch.float8_e4m3fn, (12, 4, 4))
    experts = FP8Experts(config, block_size=(16, 16)).state_dict()
    layer = "model.layers.1.mlp.experts."
    assert {layer + name: value.shape for name, value in experts.items()} == {
        name: value.shape for name, value in fused.items() if name.startswith(layer)
    }
    dequantize = Fp8Dequantize(None)._dequantize_one
    whole = dequantize(codes, scales, torch.float32)
    for expert in range(12):
        for part, name in enumerate(("gate_proj", "up_proj")):
            key = f"{layer}{expert}.{name}.weight"
            alone = dequantize(stored[key], stored[f"{key}_scale_inv"], torch.float32)
            assert torch.equal(whole[expert, 32 * part : 32 * part + 32], alone), seed
    convert(tmp_path / "b", tmp_path / "c", to="transformers")
    assert verify(tmp_path / "a", tmp_path / "c").equal
