import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from weight_convert.adapters import extract_lora, lora
from weight_convert.cli import main
from weight_convert.errors import WeightConvertError
from weight_convert.run import OutputOptions

E, H, WIDTH, R = 12, 16, 10, 2
Q, MLP = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp"
ROUTERS = {"qwen3_moe": "gate", "gpt_oss": "router"}
NAMES = ("gate_up_proj", "down_proj")


def write(folder: Path, tensors: dict[str, torch.Tensor], family: str = "qwen3_moe") -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": family}))
    return folder


def low(*shape: int) -> torch.Tensor:
    """A change of rank R."""
    *outer, rows, columns = shape
    return torch.randn(*outer, rows, R) @ torch.randn(*outer, R, columns)


def models(folder: Path, family: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A model, and what tuning made of it; experts' matrices stand in the family's order."""
    shapes = {NAMES[0]: (2 * WIDTH, H), NAMES[1]: (H, WIDTH)}
    before = {
        f"{Q}.weight": torch.randn(20, H),
        f"{MLP}.{ROUTERS[family]}.weight": torch.randn(E, H),
        "model.embed_tokens.weight": torch.randn(9, H),
        "model.norm.weight": torch.randn(H),
        "model.layers.0.self_attn.o_proj.weight": torch.randn(H, 20),
    }
    after = {key: value + torch.randn(value.shape) for key, value in before.items()}
    after[f"{Q}.weight"] = before[f"{Q}.weight"] + low(20, H)
    after["model.layers.0.self_attn.o_proj.weight"] = before[
        "model.layers.0.self_attn.o_proj.weight"
    ]
    for name, shape in shapes.items():
        shape = shape if family == "qwen3_moe" else shape[::-1]
        key = f"{MLP}.experts.{name}"
        before[key] = torch.randn(E, *shape)
        after[key] = before[key] + low(E, *shape)
    return before, after


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_an_extracted_adapter_makes_the_tuned_model_again(tmp_path: Path, family: str) -> None:
    before, after = models(tmp_path, family)
    base, tuned = write(tmp_path / "a", before, family), write(tmp_path / "b", after, family)
    dry = extract_lora(base, tuned, tmp_path / "lora", rank=R, options=OutputOptions(dry_run=True))
    command = ["lora", str(base), str(tuned), str(tmp_path / "lora"), "--extract", str(R)]
    assert main(command) == 0
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "lora").iterdir()}
    assert dict(dry.files) == sizes and dry.num_computed == 6
    config = json.loads((tmp_path / "lora" / "adapter_config.json").read_text())
    assert config["target_modules"] == [Q]
    assert sorted(config["target_parameters"]) == sorted(f"{MLP}.experts.{n}" for n in NAMES)
    kept = ["model.embed_tokens", f"{MLP}.{ROUTERS[family]}", "model.norm"]
    assert sorted(config["modules_to_save"]) == sorted(kept)
    lora(base, tmp_path / "lora", tmp_path / "again")
    found = load_file(tmp_path / "again" / "model.safetensors")
    for key, value in after.items():
        assert torch.allclose(found[key], value, atol=1e-4), key
    for module in kept:
        assert torch.equal(found[f"{module}.weight"], after[f"{module}.weight"])


def test_a_lower_rank_is_the_nearest_in_least_squares(tmp_path: Path) -> None:
    weight, change = torch.randn(20, H), torch.randn(20, H)
    base = write(tmp_path / "a", {f"{Q}.weight": weight})
    tuned = write(tmp_path / "b", {f"{Q}.weight": weight + change})
    extract_lora(base, tuned, tmp_path / "lora", rank=3)
    lora(base, tmp_path / "lora", tmp_path / "again")
    left = (weight + change) - load_file(tmp_path / "again" / "model.safetensors")[f"{Q}.weight"]
    values = torch.linalg.svdvals(change)
    assert torch.isclose(left.norm(), values[3:].norm(), rtol=1e-4)


def test_a_matrix_smaller_than_its_factors_is_kept_whole(tmp_path: Path) -> None:
    gate = f"{MLP}.shared_expert_gate.weight"
    before, after = {gate: torch.randn(1, H)}, {gate: torch.randn(1, H)}
    base, tuned = write(tmp_path / "a", before), write(tmp_path / "b", after)
    extract_lora(base, tuned, tmp_path / "lora", rank=1)
    found = load_file(tmp_path / "lora" / "adapter_model.safetensors")
    assert torch.equal(found[f"base_model.model.{gate}"], after[gate]) and len(found) == 1


def test_what_no_adapter_can_hold_is_named(tmp_path: Path) -> None:
    fused = f"{MLP}.experts.down_proj"
    before = {f"{Q}.weight": torch.randn(20, H), f"{Q}.bias": torch.randn(20)}
    before[fused] = torch.randn(E, H, WIDTH)
    new = {key: value + 1 for key, value in before.items()}
    base = write(tmp_path / "base", before)
    cases = [
        (before, 1, "hold the same bytes; nothing to extract"),
        (before | {"x": torch.ones(1)}, 1, r"only .* has x; the two models must have the same"),
        (before | {f"{Q}.bias": torch.ones(3)}, 1, r"is \[20\] in .* and \[3\]"),
        (before | {f"{Q}.weight": new[f"{Q}.weight"], f"{Q}.bias": new[f"{Q}.bias"]}, 1, "bias"),
        (before | {fused: new[fused]}, 11, "rank=11 is more than the experts .* choose 10"),
        (new, 0, "rank=0; expected at least 1"),
    ]
    for number, (tensors, rank, message) in enumerate(cases):
        tuned = write(tmp_path / str(number), tensors)
        with pytest.raises(WeightConvertError, match=message):
            extract_lora(base, tuned, tmp_path / "lora", rank=rank)
    assert not (tmp_path / "lora").exists()


@pytest.mark.parametrize("rank", [1, 2])
def test_a_convolution_is_no_expert_and_is_stored_whole(tmp_path: Path, rank: int) -> None:
    conv, proj = (f"model.layers.0.mamba.{name}" for name in ("conv1d", "in_proj"))
    before = {f"{conv}.weight": torch.randn(8, 1, 4), f"{proj}.weight": torch.randn(16, 8)}
    after = {key: value + torch.randn(value.shape) for key, value in before.items()}
    base, tuned = write(tmp_path / "a", before, "jamba"), write(tmp_path / "b", after, "jamba")
    extract_lora(base, tuned, tmp_path / "lora", rank=rank)
    config = json.loads((tmp_path / "lora" / "adapter_config.json").read_text())
    assert config["modules_to_save"] == [conv] and config["target_modules"] == [proj]
    lora(base, tmp_path / "lora", tmp_path / "again")
    found = load_file(tmp_path / "again" / "model.safetensors")
    assert torch.equal(found[f"{conv}.weight"], after[f"{conv}.weight"])
