"""Qwen3-VL-MoE: experts as transformers 4 stored them, and the decoder as Qwen3-MoE's.

The oracle is transformers: it loads both orientations of experts, telling them by their shapes, and
Qwen3-MoE of the text_config computes what the whole model does without an image.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from weight_convert import (
    ConversionOptions,
    convert,
    explain,
    inspect,
    join,
    split,
    verify,
)
from weight_convert.cutting import SplitLayout

transformers = pytest.importorskip("transformers", reason="the oracle needs transformers")
MakeModel = Callable[[str], tuple[int, Any]]
TOKENS = torch.arange(10)[None]
FORMATS = ("transformers", "fused", "transformers4", "qwen3_moe", "megatron", "megatron_sequential")


def published(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """Write a model as transformers 4.57 did: matrices of experts are [in, out]."""
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors = {
        key: value.transpose(1, 2).contiguous() if ".experts." in key else value
        for key, value in load_file(path).items()
    }
    save_file(tensors, path, metadata={"format": "pt"})
    return tensors


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS).logits


def test_published_files_are_told_by_their_shapes_and_load_the_same(
    make_model: MakeModel, tmp_path: Path
) -> None:
    seed, model = make_model("qwen3_vl_moe")
    tensors = published(model, tmp_path / "pub")
    assert inspect(tmp_path / "pub").format == "transformers4"
    assert explain(tmp_path / "pub").is_whole, seed
    loaded = type(model).from_pretrained(tmp_path / "pub", dtype=torch.float32)
    torch.testing.assert_close(logits(loaded), logits(model), rtol=1e-5, atol=1e-5)
    report = convert(tmp_path / "pub", tmp_path / "hf", to="transformers")
    assert len(report.other_keys) == sum(".visual." in key for key in tensors)
    found, expected = load_file(tmp_path / "hf/model.safetensors"), model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items()), seed
    back = convert(tmp_path / "hf", tmp_path / "back", to="transformers4")
    assert not back.is_experimental
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "pub" / name).read_bytes()


@pytest.mark.parametrize("source", FORMATS)
def test_every_format_leads_to_every_other_one(
    source: str, make_model: MakeModel, tmp_path: Path
) -> None:
    seed, model = make_model("qwen3_vl_moe")
    model.save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / source, to=source)
    for target in FORMATS:
        folder = tmp_path / f"to_{target}"
        convert(tmp_path / source, folder, to=target)
        assert verify(tmp_path / "hf", folder).equal, (target, seed)
        vision = {k: v for k, v in load_file(folder / "model.safetensors").items() if "visual" in k}
        assert vision and all(torch.equal(model.state_dict()[k], v) for k, v in vision.items())


def test_the_decoder_is_qwen3_moe_where_there_is_no_image(
    make_model: MakeModel, tmp_path: Path
) -> None:
    seed, model = make_model("qwen3_vl_moe")
    published(model, tmp_path / "pub")
    convert(tmp_path / "pub", tmp_path / "text", to="qwen3_moe")
    (tmp_path / "alone").mkdir()
    tensors = load_file(tmp_path / "text/model.safetensors")
    tensors = {key: value for key, value in tensors.items() if ".visual." not in key}
    save_file(tensors, tmp_path / "alone/model.safetensors", metadata={"format": "pt"})
    values = json.loads((tmp_path / "text/config.json").read_text())["text_config"]
    values["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6}
    values |= {"model_type": "qwen3_moe", "norm_topk_prob": True}
    (tmp_path / "alone/config.json").write_text(json.dumps(values))
    loaded, info = transformers.Qwen3MoeForCausalLM.from_pretrained(
        tmp_path / "alone", output_loading_info=True, dtype=torch.float32
    )
    assert not info["missing_keys"] and not info["unexpected_keys"], seed
    torch.testing.assert_close(logits(loaded), logits(model), rtol=1e-5, atol=1e-5)


def test_a_cast_is_said_in_every_part_of_the_config(make_model: MakeModel, tmp_path: Path) -> None:
    _, model = make_model("qwen3_vl_moe")
    model.save_pretrained(tmp_path / "hf")
    path = tmp_path / "hf/config.json"
    values = json.loads(path.read_text())
    values["text_config"]["torch_dtype"] = "float32"
    path.write_text(json.dumps(values))
    options = ConversionOptions(dtype="bfloat16", unknown="refuse")
    convert(tmp_path / "hf", tmp_path / "out", to="transformers4", options=options)
    told = json.loads((tmp_path / "out/config.json").read_text())
    assert (told["dtype"], told["text_config"]["dtype"]) == ("bfloat16", "bfloat16")
    assert "torch_dtype" not in told["text_config"]
    loaded = type(model).from_pretrained(tmp_path / "out")
    assert {tensor.dtype for tensor in loaded.state_dict().values()} == {torch.bfloat16}


def test_the_vision_tower_is_whole_on_the_first_stage_alone(
    make_model: MakeModel, tmp_path: Path
) -> None:
    seed, model = make_model("qwen3_vl_moe")
    model.save_pretrained(tmp_path / "hf")
    split(tmp_path / "hf", tmp_path / "ranks", SplitLayout(tp=2, pp=2))
    vision = {key for key in model.state_dict() if ".visual." in key}
    for folder in sorted((tmp_path / "ranks").glob("*/")):
        found = set().union(*(load_file(path) for path in folder.glob("*.safetensors")))
        assert found & vision in (vision, set()), folder
        assert (".layers.0." in " ".join(found)) == bool(found & vision), (folder, seed)
    join(tmp_path / "ranks", tmp_path / "joined")
    assert verify(tmp_path / "hf", tmp_path / "joined").equal, seed


def test_values_and_logits_are_compared_with_transformers(
    make_model: MakeModel, tmp_path: Path
) -> None:
    _, model = make_model("qwen3_vl_moe")
    published(model, tmp_path / "pub")
    convert(tmp_path / "pub", tmp_path / "hf", to="transformers")
    report = verify(tmp_path / "pub", tmp_path / "hf", level="logits")
    assert report.equal and report.opinion is not None
    assert report.opinion.max_logit_difference == 0
