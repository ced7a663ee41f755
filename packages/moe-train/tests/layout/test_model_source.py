import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from moe_train.layout.model_source import read_decoder

VALUES = {
    "model_type": "glm4_moe",
    "vocab_size": 20,
    "hidden_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "moe_intermediate_size": 6,
    "intermediate_size": 6,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "num_nextn_predict_layers": 2,
}


def folder_with(path: Path, *layers: int) -> Path:
    (path / "config.json").write_text(json.dumps(VALUES))
    tensors = {f"model.layers.{n}.eh_proj.weight": torch.zeros(1) for n in layers}
    save_file({"model.norm.weight": torch.zeros(8), **tensors}, path / "model.safetensors")
    return path


@pytest.mark.parametrize(("layers", "count"), [((), 0), ((3,), 1), ((4,), 0), ((3, 4), 2)])
def test_a_folder_has_the_further_layers_that_it_holds_weights_of(
    tmp_path: Path, layers: tuple[int, ...], count: int
) -> None:
    config = read_decoder(folder_with(tmp_path, *layers))
    assert config.num_nextn_predict_layers == count
    assert json.loads(config.to_json("float32"))["num_nextn_predict_layers"] == count


def test_a_file_is_believed(tmp_path: Path) -> None:
    folder_with(tmp_path)
    assert read_decoder(tmp_path / "config.json").num_nextn_predict_layers == 2


def test_a_folder_without_weights_is_left_to_whoever_loads_them(tmp_path: Path) -> None:
    (folder_with(tmp_path) / "model.safetensors").unlink()
    assert read_decoder(tmp_path).num_nextn_predict_layers == 2
