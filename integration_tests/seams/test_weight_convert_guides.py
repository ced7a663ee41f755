"""The commands and files of the guides, run as they stand."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from weight_convert.cli import main
from weight_convert.merging import read_config

GUIDES = Path(__file__).parents[2] / "docs"
QUERY = "model.layers.0.self_attn.q_proj"


def blocks(name: str, language: str) -> list[str]:
    text = (GUIDES / name).read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.S)


def commands(name: str) -> list[list[str]]:
    lines = "".join(blocks(name, "bash")).splitlines()
    return [
        shlex.split(line, comments=True)[1:] for line in lines if line.startswith("weight-convert")
    ]


def write_model_and_adapter(folder: Path) -> torch.Tensor:
    tensors = {f"{QUERY}.weight": torch.randn(6, 4)}
    for expert in range(2):
        for part, shape in (("gate", (3, 4)), ("up", (3, 4)), ("down", (4, 3))):
            tensors[f"model.layers.0.mlp.experts.{expert}.{part}_proj.weight"] = torch.randn(shape)
    (folder / "Qwen3-30B-A3B").mkdir()
    save_file(tensors, folder / "Qwen3-30B-A3B" / "model.safetensors", metadata={"format": "pt"})
    config = {"model_type": "qwen3_moe", "num_experts": 2}
    (folder / "Qwen3-30B-A3B" / "config.json").write_text(json.dumps(config))
    (folder / "Qwen3-8B").mkdir()
    dense = {
        f"model.layers.0.mlp.{part}_proj.weight": torch.randn(shape)
        for part, shape in (("gate", (3, 4)), ("up", (3, 4)), ("down", (4, 3)))
    }
    save_file(dense, folder / "Qwen3-8B" / "model.safetensors", metadata={"format": "pt"})
    (folder / "Qwen3-8B" / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    (folder / "my-lora").mkdir()
    parts = {"lora_A": torch.randn(2, 4), "lora_B": torch.randn(6, 2)}
    named = {f"base_model.model.{QUERY}.{name}.weight": part for name, part in parts.items()}
    save_file(named, folder / "my-lora" / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}
    (folder / "my-lora" / "adapter_config.json").write_text(json.dumps(config))
    return tensors[f"{QUERY}.weight"] + 2 * parts["lora_B"] @ parts["lora_A"]


@pytest.mark.parametrize("guide", ["merge-lora", "weight-convert"])
def test_the_guides_have_the_same_commands(guide: str) -> None:
    assert commands(f"{guide}.md") == commands(f"{guide}.zh.md") and commands(f"{guide}.md")


def write_whole_model(folder: Path) -> None:
    layer, shapes = "model.layers.0.", {"model.embed_tokens.weight": (9, 6)}
    for name, shape in (("q", (16, 6)), ("k", (8, 6)), ("v", (8, 6)), ("o", (6, 16))):
        shapes[f"{layer}self_attn.{name}_proj.weight"] = shape
    for name in ("self_attn.q_norm", "self_attn.k_norm"):
        shapes[f"{layer}{name}.weight"] = (4,)
    for name in ("input_layernorm", "post_attention_layernorm"):
        shapes[f"{layer}{name}.weight"] = (6,)
    shapes |= {f"{layer}mlp.gate.weight": (12, 6), "model.norm.weight": (6,)}
    for expert in range(12):
        for part, shape in (("gate", (5, 6)), ("up", (5, 6)), ("down", (6, 5))):
            shapes[f"{layer}mlp.experts.{expert}.{part}_proj.weight"] = shape
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    (folder / "Qwen3-30B-A3B").mkdir()
    save_file(tensors, folder / "Qwen3-30B-A3B" / "model.safetensors", metadata={"format": "pt"})
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
    config = {"model_type": "qwen3_moe", "num_experts": 12, **heads}
    (folder / "Qwen3-30B-A3B" / "config.json").write_text(json.dumps(config))


def test_the_commands_of_the_guide_convert_split_and_describe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_whole_model(tmp_path)
    for command in commands("weight-convert.md"):
        arguments, _, into = " ".join(command).partition(" > ")
        assert main(arguments.split()) == 0, command
        told = capsys.readouterr().out
        if into:
            (tmp_path / into).write_text(told)


def test_the_commands_of_the_guide_merge_an_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    expected = write_model_and_adapter(tmp_path)
    for command in commands("merge-lora.md"):
        assert main(command) == 0, command
    for name in ("merged", "merged-experts"):
        found = load_file(tmp_path / name / "model.safetensors")[f"{QUERY}.weight"]
        assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("guide", ["merge-lora.md", "merge-lora.zh.md"])
def test_the_merges_of_the_guide_are_read(tmp_path: Path, guide: str) -> None:
    methods = []
    for text in blocks(guide, "toml"):
        (tmp_path / "merge.toml").write_text(text, encoding="utf-8")
        methods.append(read_config(tmp_path / "merge.toml").method)
    assert methods == ["ties", "passthrough"]
