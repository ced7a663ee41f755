"""Quantised weights as transformers reads and writes them, against weight-convert's."""

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from weight_convert import convert, dequantize, quantize

KEY = "model.layers.0.mlp.experts.{}.{}_proj.weight"


class Quantizer:
    """The part of transformers' quantizer that its operations ask for."""

    quantization_config = FineGrainedFP8Config(weight_block_size=(128, 128))


def write(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, object]) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def plain_experts(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    shapes = {"gate": (128, 256), "up": (128, 256), "down": (256, 128)}
    return {
        KEY.format(expert, part): torch.randn(shape).bfloat16() * 10.0 ** random.randint(-6, 6)
        for expert in range(12)
        for part, shape in shapes.items()
    }


def test_fresh_fp8_is_what_transformers_quantises_to_and_it_reads_ours(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    plain = plain_experts(seed)
    config = {"model_type": "qwen3_moe", "num_experts": 12}
    write(tmp_path / "plain", plain, config)
    quantize(tmp_path / "plain", tmp_path / "fp8", to="fp8")
    found = load_file(tmp_path / "fp8" / "model.safetensors")
    quantised = Fp8Quantize(Quantizer()).convert(dict(plain))
    assert found.keys() == quantised.keys()
    for key, value in quantised.items():
        assert torch.equal(found[key].view(torch.uint8), value.contiguous().view(torch.uint8)), (
            key,
            seed,
        )
    theirs = Fp8Dequantize(Quantizer())
    convert(tmp_path / "fp8", tmp_path / "fused", to="fused")
    dequantize(tmp_path / "fp8", tmp_path / "ours", dtype="float32")
    dequantize(tmp_path / "fused", tmp_path / "ours_fused", dtype="float32")
    ours = load_file(tmp_path / "ours" / "model.safetensors")
    for key in plain:
        scale = found[key + "_scale_inv"]
        assert torch.equal(ours[key], theirs._dequantize_one(found[key], scale, torch.float32))
    fused = load_file(tmp_path / "fused" / "model.safetensors")
    ours_fused = load_file(tmp_path / "ours_fused" / "model.safetensors")
    for key in ours_fused:
        scale = fused[key + "_scale_inv"]
        assert torch.equal(
            ours_fused[key], theirs._dequantize_one(fused[key], scale, torch.float32)
        )


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
def test_mxfp4_decodes_as_transformers_decodes_it(tmp_path: Path, name: str) -> None:
    prefix = f"model.layers.0.mlp.experts.{name}"
    blocks = torch.randint(0, 256, (12, 10, 3, 16), dtype=torch.uint8)
    scales = torch.randint(90, 160, (12, 10, 3), dtype=torch.uint8)
    entry = {"quant_method": "mxfp4"}
    config = {"model_type": "gpt_oss", "num_local_experts": 12, "quantization_config": entry}
    write(tmp_path / "a", {f"{prefix}_blocks": blocks, f"{prefix}_scales": scales}, config)
    dequantize(tmp_path / "a", tmp_path / "b")
    found = load_file(tmp_path / "b" / "model.safetensors")[prefix]
    assert torch.equal(found, convert_moe_packed_tensors(blocks, scales))
