"""Comparing directories by values and logits: transformers' loader against rules that are wrong.

The wrong rules are wrong in both directions, so that a comparison by them alone sees nothing.
"""

import json
import random
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from weight_convert import (
    ConversionOptions,
    OutputOptions,
    WeightConvertError,
    convert,
    dequantize,
    quantize,
    read_spec,
    verify,
)
from weight_convert.cli import main
from weight_convert.specs import spec_text

transformers = pytest.importorskip("transformers", reason="the second opinion is transformers'")
from transformers.integrations.finegrained_fp8 import Fp8Dequantize  # noqa: E402

SIZES = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "intermediate_size": 128,
    "num_experts": 12,
    "moe_intermediate_size": 128,
    "head_dim": 8,
}

_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def make_model(folder: Path) -> Path:
    torch.manual_seed(random.randrange(2**32))
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SIZES))
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def changed(source: Path, target: Path, key: str, change: Any) -> Path:
    """A copy of a directory of one file in which a tensor differs."""
    target.mkdir()
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = load_file(source / "model.safetensors")
    tensors[key] = change(tensors[key])
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_a_rule_that_is_wrong_in_both_directions_does_not_agree_with_itself(
    tmp_path: Path,
) -> None:
    text = spec_text("qwen3_moe")
    gate, up = "experts.{expert}.gate_proj", "experts.{expert}.up_proj"
    wrong = text.replace(gate, "?").replace(up, gate).replace("?", up)
    assert wrong != text
    (tmp_path / "wrong.toml").write_text(wrong)
    spec = read_spec(tmp_path / "wrong.toml")
    a = make_model(tmp_path / "a")
    convert(a, tmp_path / "b", to="fused", spec=spec)
    assert verify(a, tmp_path / "b", spec=spec).equal
    report = verify(a, tmp_path / "b", spec=spec, level="values")
    assert [difference.key for difference in report.differences] == [
        f"model.layers.{layer}.mlp.experts.gate_up_proj" for layer in (0, 1)
    ]
    convert(a, tmp_path / "c", to="fused")
    for level in ("values", "logits"):
        report = verify(a, tmp_path / "c", level=level)
        assert report.equal
        assert report.opinion is not None
        assert report.opinion.max_logit_difference == (0.0 if level == "logits" else None)


def test_dtypes_may_differ_where_numbers_do_not(tmp_path: Path) -> None:
    a = make_model(tmp_path / "a")
    convert(a, tmp_path / "b", to="fused", options=ConversionOptions(dtype="float32"))
    assert not verify(a, tmp_path / "b").equal
    assert verify(a, tmp_path / "b", level="logits").equal
    key = "model.layers.1.self_attn.q_proj.weight"
    half = changed(a, tmp_path / "c", key, lambda tensor: tensor.float() * (1 + 2**-12))
    found = verify(a, half, level="values").differences
    assert {difference.key for difference in found} == {key}
    assert len(found) == 2  # by the package's own reading, and by transformers'


def test_what_transformers_does_not_load_is_compared_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = make_model(tmp_path / "plain")
    for number in range(2):
        folder = tmp_path / f"extra{number}"
        folder.mkdir()
        (folder / "config.json").write_bytes((plain / "config.json").read_bytes())
        tensors = load_file(plain / "model.safetensors") | {"model.x": torch.ones(3) * number}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    names = [str(tmp_path / f"extra{number}") for number in range(2)]
    assert main(["verify", *names, "--level", "logits"]) == 1
    printed = capsys.readouterr().out
    assert "model.x: bytes differ from byte 2 of 12 on" in printed
    assert "the same values" in printed
    assert "it does not load 1 stored tensors: model.x" in printed
    assert "logits differ by at most 0; " in printed


def test_parameters_that_transformers_makes_up_are_an_error(tmp_path: Path) -> None:
    a = make_model(tmp_path / "a")
    tensors = load_file(a / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, a / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightConvertError, match=r"of the right shape for 1 .*norm"):
        verify(a, a, level="values")


def test_a_directory_that_transformers_cannot_load_is_one_error(tmp_path: Path) -> None:
    a = make_model(tmp_path / "a")
    (a / "config.json").write_text(json.dumps({"model_type": "unheard_of"}))
    with pytest.raises(WeightConvertError, match="cannot load"):
        verify(a, a, level="values")


@pytest.mark.skipif(find_spec("accelerate") is None, reason="transformers' fp8 needs accelerate")
def test_fp8_loads_in_transformers_and_dequantises_to_the_same_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fp8, plain, fused = tmp_path / "fp8", tmp_path / "plain", tmp_path / "fused"
    quantize(make_model(tmp_path / "a"), fp8, to="fp8")
    dequantize(fp8, plain, options=OutputOptions())
    assert verify(fp8, plain, level="logits").equal
    convert(fp8, fused, to="fused")
    with pytest.raises(WeightConvertError, match="so its codes are no weights"):
        verify(fused, plain, level="values")
    # On a GPU transformers keeps codes and scales; no kernel runs while it loads them.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: (9, 0))
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        fused, output_loading_info=True, device_map="cpu"
    )
    assert not (info["missing_keys"] | info["unexpected_keys"])
    held, expected = model.state_dict(), load_file(plain / "model.safetensors")
    for layer in range(2):
        for fused_name, names in _PARTS.items():
            key = f"model.layers.{layer}.mlp.experts.{fused_name}"
            values = Fp8Dequantize(None)._dequantize_one(
                held[key], held[f"{key}_scale_inv"], torch.bfloat16
            )
            for expert in range(12):
                prefix = f"model.layers.{layer}.mlp.experts.{expert}."
                whole = torch.cat([expected[f"{prefix}{name}.weight"] for name in names])
                assert torch.equal(values[expert], whole)
