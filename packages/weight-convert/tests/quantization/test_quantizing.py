import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from weight_convert.errors import IncompleteExpertsError, WeightConvertError
from weight_convert.quantization import dequantize, quantize
from weight_convert.run import OutputOptions, convert

E4M3 = torch.float8_e4m3fn
FP8 = {"quant_method": "fp8", "weight_block_size": [3, 4], "activation_scheme": "dynamic"}


def fp8_model(folder: Path, *, experts=11, rows=6, columns=10, extreme=False) -> dict:
    """A model of one layer, scales in another file than weights; every code, odd scales."""
    tensors, scales = {}, {}
    for expert in range(experts):
        for part, shape in (
            ("gate", (rows, columns)),
            ("up", (rows, columns)),
            ("down", (columns, rows)),
        ):
            key = f"model.layers.0.mlp.experts.{expert}.{part}_proj.weight"
            tensors[key] = torch.randint(0, 256, shape, dtype=torch.uint8).view(E4M3)
            grid = (-(-shape[0] // 3), -(-shape[1] // 4))
            low, high = (-160, 140) if extreme else (-20, 20)
            scale = torch.exp2(torch.randint(low, high, grid).float()) * (1 + torch.rand(grid))
            if extreme:
                scale[0, 0] = random.choice([0.0, float("inf"), float("nan"), 1e-45, -2.0])
            scales[key + "_scale_inv"] = scale
    tensors["model.layers.0.mlp.gate.weight"] = torch.randn(experts, columns).bfloat16()
    tensors["model.norm.weight"] = torch.randn(columns).bfloat16()
    write(folder, [tensors, scales], {"num_experts": experts, "quantization_config": FP8})
    return tensors | scales


def write(folder: Path, shards: list[dict], config: dict) -> None:
    folder.mkdir()
    names = [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, folder / name, metadata={"format": "pt"})
    places = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    config = {"model_type": "qwen3_moe", "torch_dtype": "bfloat16"} | config
    (folder / "config.json").write_text(json.dumps(config))


def read(folder: Path) -> dict:
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(
        a[key].dtype == b[key].dtype
        and a[key].shape == b[key].shape
        and torch.equal(
            a[key].contiguous().view(torch.uint8), b[key].contiguous().view(torch.uint8)
        )
        for key in a
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("extreme", [False, True])
def test_fp8_there_and_back_gives_every_byte(tmp_path: Path, dtype: str, extreme: bool) -> None:
    stored = fp8_model(tmp_path / "a", extreme=extreme)
    options = OutputOptions(max_shard_bytes=400)
    dry = dequantize(
        tmp_path / "a",
        tmp_path / "b",
        dtype=dtype,
        options=OutputOptions(max_shard_bytes=400, dry_run=True),
    )
    assert not (tmp_path / "b").exists()
    done = dequantize(tmp_path / "a", tmp_path / "b", dtype=dtype, options=options)
    files = {p.name: p.stat().st_size for p in (tmp_path / "b").iterdir()}
    assert dict(dry.files) == dict(done.files) == files
    plain = read(tmp_path / "b")
    assert {t.dtype for t in plain.values()} <= {getattr(torch, dtype), torch.bfloat16}
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert config["dtype"] == dtype and "quantization_config" not in config
    quantize(tmp_path / "b", tmp_path / "c")
    assert same(read(tmp_path / "c"), stored)
    config = json.loads((tmp_path / "c" / "config.json").read_text())
    assert (
        config["quantization_config"] == FP8 and not (tmp_path / "c" / "quantization.kept").exists()
    )


def test_experts_may_be_fused_before_or_after_they_are_dequantised(tmp_path: Path) -> None:
    fp8_model(tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "fused", to="fused")
    dequantize(tmp_path / "fused", tmp_path / "fused_plain")
    dequantize(tmp_path / "a", tmp_path / "plain", keep_scales=False)
    convert(tmp_path / "plain", tmp_path / "plain_fused", to="fused")
    assert same(read(tmp_path / "fused_plain"), read(tmp_path / "plain_fused"))
    quantize(tmp_path / "fused_plain", tmp_path / "again")
    assert same(read(tmp_path / "again"), read(tmp_path / "fused"))


def test_mxfp4_of_gpt_oss_there_and_back_gives_every_byte(tmp_path: Path) -> None:
    prefix = "model.layers.0.mlp.experts"

    def any_byte(*shape: int, low: int = 0, high: int = 256) -> torch.Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8)

    stored = {
        f"{prefix}.gate_up_proj_blocks": any_byte(3, 6, 2, 16),
        f"{prefix}.gate_up_proj_scales": any_byte(3, 6, 2),
        f"{prefix}.down_proj_blocks": any_byte(3, 5, 1, 16),
        f"{prefix}.down_proj_scales": any_byte(3, 5, 1, low=100, high=140),
        f"{prefix}.gate_up_proj_bias": torch.randn(3, 6).bfloat16(),
    }
    entry = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    write(
        tmp_path / "a",
        [stored],
        {"model_type": "gpt_oss", "num_local_experts": 3, "quantization_config": entry},
    )
    dequantize(tmp_path / "a", tmp_path / "b")
    plain = read(tmp_path / "b")
    assert plain[f"{prefix}.gate_up_proj"].shape == (3, 64, 6)
    quantize(tmp_path / "b", tmp_path / "c")
    assert same(read(tmp_path / "c"), stored)


@pytest.mark.parametrize("to", ["fp8", "mxfp4"])
def test_fresh_scales_are_for_experts_and_matrices_but_routers(tmp_path: Path, to: str) -> None:
    layer = "model.layers.0"
    tensors = {
        f"{layer}.self_attn.q_proj.weight": torch.randn(64, 32),
        f"{layer}.self_attn.q_proj.bias": torch.randn(64),
        f"{layer}.mlp.router.weight": torch.randn(2, 32),
        f"{layer}.mlp.experts.gate_up_proj": torch.randn(2, 32, 12),
        f"{layer}.mlp.experts.gate_up_proj_bias": torch.randn(2, 12),
        f"{layer}.mlp.experts.down_proj": torch.randn(2, 64, 32),
        "lm_head.weight": torch.randn(40, 32),
    }
    write(tmp_path / "a", [tensors], {"model_type": "gpt_oss", "num_local_experts": 2})
    quantize(tmp_path / "a", tmp_path / "b", to=to)
    experts = {f"{layer}.mlp.experts.gate_up_proj", f"{layer}.mlp.experts.down_proj"}
    chosen = experts | ({f"{layer}.self_attn.q_proj.weight"} if to == "fp8" else set())
    ends = ("", "_scale_inv") if to == "fp8" else ("_blocks", "_scales")
    found = read(tmp_path / "b")
    assert found.keys() == tensors.keys() - chosen | {key + end for key in chosen for end in ends}
    dequantize(tmp_path / "b", tmp_path / "c", dtype="float32", keep_scales=False)
    for key, value in read(tmp_path / "c").items():
        limit = (1 / 12 if to == "fp8" else 0.51) if key in chosen else 0.0
        assert ((value - tensors[key]).abs() <= limit * tensors[key].abs() + limit / 2).all(), key


def test_mxfp4_is_refused_where_no_program_reads_it(tmp_path: Path) -> None:
    key = "model.layers.0.mlp.experts.0.up_proj.weight"
    write(tmp_path / "a", [{key: torch.randn(64, 32)}], {})
    with pytest.raises(WeightConvertError, match=r"which those of qwen3_moe do not; choose fp8"):
        quantize(tmp_path / "a", tmp_path / "b", to="mxfp4")


def test_tensors_to_skip_stay_and_a_pattern_without_one_is_refused(tmp_path: Path) -> None:
    key = "model.layers.0.self_attn.{}_proj.weight"
    tensors = {key.format(name): torch.randn(8, 8) for name in "qo"}
    write(tmp_path / "a", [tensors], {})
    quantize(tmp_path / "a", tmp_path / "b", to="fp8", skip=["*.o_proj.weight"])
    assert read(tmp_path / "b")[key.format("o")].dtype == torch.float32
    entry = json.loads((tmp_path / "b" / "config.json").read_text())["quantization_config"]
    assert entry["modules_to_not_convert"] == ["lm_head", key.format("o").removesuffix(".weight")]
    with pytest.raises(WeightConvertError, match=r"skip='\*.x' matches no tensor"):
        quantize(tmp_path / "a", tmp_path / "c", to="fp8", skip=["*.x"])


@pytest.mark.parametrize("pattern", ["*.experts.*", "*mlp.experts*", "model.layers.3.mlp.*"])
def test_config_names_the_modules_whose_tensors_were_skipped_and_parts_are_refused(
    tmp_path: Path, pattern: str
) -> None:
    mlp, q = "model.layers.3.mlp.experts", "model.layers.3.self_attn.q_proj"
    names = [f"{mlp}.{e}.{part}_proj" for e in range(11) for part in ("gate", "up", "down")]
    write(tmp_path / "a", [{f"{name}.weight": torch.randn(8, 8) for name in (*names, q)}], {})
    quantize(tmp_path / "a", tmp_path / "b", to="fp8", skip=[pattern])
    found = read(tmp_path / "b")
    assert {key for key, value in found.items() if value.dtype == torch.float8_e4m3fn} == {
        f"{q}.weight"
    }
    entry = json.loads((tmp_path / "b" / "config.json").read_text())["quantization_config"]
    assert entry["modules_to_not_convert"] == ["lm_head", mlp]
    with pytest.raises(WeightConvertError, match=f"leaves a part of {mlp} as it is, but not"):
        quantize(tmp_path / "a", tmp_path / "c", to="fp8", skip=["*.down_proj.weight"])


def test_matrices_of_mamba_stay_plain_and_the_config_says_so(tmp_path: Path) -> None:
    tensors = {
        "model.layers.0.mamba.A_log": torch.randn(8, 4),
        "model.layers.0.mamba.conv1d.weight": torch.randn(8, 1, 4),
        "model.layers.0.mamba.in_proj.weight": torch.randn(16, 8),
        "model.layers.0.feed_forward.up_proj.weight": torch.randn(8, 8),
    }
    write(tmp_path / "a", [tensors], {"model_type": "jamba"})
    quantize(tmp_path / "a", tmp_path / "b", to="fp8")
    found = read(tmp_path / "b")
    assert all(torch.equal(found[key], tensors[key]) for key in list(tensors)[:3])
    assert found.keys() - tensors.keys() == {
        "model.layers.0.feed_forward.up_proj.weight_scale_inv",
    }
    entry = json.loads((tmp_path / "b" / "config.json").read_text())["quantization_config"]
    assert entry["modules_to_not_convert"] == ["lm_head", "model.layers.0.mamba"]


def test_matrices_of_other_parts_stay_plain_and_the_config_says_so(tmp_path: Path) -> None:
    visual, layer = "model.visual.blocks.{}.attn.qkv", "model.language_model.layers.0"
    tensors = {
        **{visual.format(n) + ".weight": torch.randn(12, 4) for n in range(11)},
        **{visual.format(n) + ".bias": torch.randn(12) for n in range(11)},
        "model.audio.norm.weight": torch.randn(4),
        "model.audio.proj.weight": torch.randn(4, 4),
        f"{layer}.self_attn.o_proj.weight": torch.randn(4, 4),
        f"{layer}.mlp.experts.down_proj": torch.randn(2, 4, 4),
    }
    write(tmp_path / "a", [tensors], {"model_type": "qwen3_vl_moe"})
    quantize(tmp_path / "a", tmp_path / "b", to="fp8")
    found = read(tmp_path / "b")
    assert [key for key in tensors if found[key].dtype == E4M3] == list(tensors)[-2:]
    entry = json.loads((tmp_path / "b" / "config.json").read_text())["quantization_config"]
    plain = ["model.audio.proj", *(visual.format(n) for n in range(11))]
    assert entry["modules_to_not_convert"] == ["lm_head", *plain]


def test_what_does_not_belong_together_is_named(tmp_path: Path) -> None:
    fp8_model(tmp_path / "a")
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    index = json.loads((tmp_path / "a" / "model.safetensors.index.json").read_text())
    shard = tmp_path / "a" / "model-00002-of-00002.safetensors"
    scales = load_file(shard)
    gone = "model.layers.0.mlp.experts.10.up_proj.weight_scale_inv"

    def with_scales(changed: dict) -> None:
        save_file(changed, shard)
        weights = {k: v for k, v in index["weight_map"].items() if v != shard.name}
        places = weights | dict.fromkeys(changed, shard.name)
        text = json.dumps({"weight_map": places})
        (tmp_path / "a" / "model.safetensors.index.json").write_text(text)

    def message() -> str:
        with pytest.raises(WeightConvertError) as caught:
            dequantize(tmp_path / "a", tmp_path / "b")
        assert not (tmp_path / "b").exists()
        return str(caught.value)

    with_scales({key: value for key, value in scales.items() if key != gone})
    assert f"its scales {gone} are missing" in message()
    with_scales(scales | {gone: torch.ones(1, 1)})
    assert f"{gone} has shape [1, 1], expected [2, 3]" in message()
    with_scales(scales | {"model.x_scale_inv": torch.ones(1)})
    assert "model.x_scale_inv has no codes of fp8 beside it" in message()
    with_scales(scales)
    (tmp_path / "a" / "config.json").write_text(json.dumps(config | {"quantization_config": None}))
    assert "has no quantization_config" in message()
    other = {"quant_method": "gptq"}
    (tmp_path / "a" / "config.json").write_text(json.dumps(config | {"quantization_config": other}))
    assert "quant_method 'gptq'" in message()


def test_kept_scales_of_other_tensors_are_refused(tmp_path: Path) -> None:
    fp8_model(tmp_path / "a")
    dequantize(tmp_path / "a", tmp_path / "b")
    convert(tmp_path / "b", tmp_path / "c", to="fused")
    with pytest.raises(IncompleteExpertsError, match="convert back to the format"):
        quantize(tmp_path / "c", tmp_path / "d")
    dequantize(tmp_path / "a", tmp_path / "e", keep_scales=False)
    with pytest.raises(WeightConvertError, match=r"has no quantization.kept; choose to='fp8'"):
        quantize(tmp_path / "e", tmp_path / "d")


@pytest.mark.parametrize("method", ["fp8", "mxfp4"])
def test_codes_that_are_no_matrix_are_refused(tmp_path: Path, method: str) -> None:
    key = "model.norm.weight" + ("_blocks" if method == "mxfp4" else "")
    scales = "model.norm.weight" + ("_scales" if method == "mxfp4" else "_scale_inv")
    dtype = torch.uint8 if method == "mxfp4" else E4M3
    codes = {key: torch.zeros(16, dtype=torch.uint8).view(dtype), scales: torch.ones(1)}
    entry = {"quantization_config": FP8 | {"quant_method": method}}
    write(tmp_path / "a", [codes], entry)
    with pytest.raises(
        IncompleteExpertsError, match=rf"{key} has shape \[16\], which is no matrix"
    ):
        dequantize(tmp_path / "a", tmp_path / "b")
