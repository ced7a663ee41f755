from pathlib import Path
from typing import Any

from weight_convert import explain, get_spec


def test_a_directory_is_held_against_its_spec(oracle: Any, model: Any, tmp_path: Path) -> None:
    known = {k: v for k, v in model.per_expert.items() if "step" not in k and "empty" not in k}
    known.pop("model.mtp.unheard_of")
    oracle.write_folder(tmp_path / "a", [known], model.config)
    found = explain(tmp_path / "a")
    assert found.is_whole, found
    assert (found.model_type, found.format, found.num_named) == ("qwen3_moe", "transformers", 9)
    found = explain(model.write(tmp_path / "b", "fused"))
    assert set(found.unknown) == set(model.fused) - set(known) - {
        "model.layers.1.mlp.experts.gate_up_proj",
        "model.layers.1.mlp.experts.down_proj",
    }
    assert not found.is_whole


def test_dims_of_one_name_have_one_size(oracle: Any, model: Any, tmp_path: Path) -> None:
    tensors = model.per_expert | {
        "model.norm.weight": ("U8", (11,), bytes(11)),
        "lm_head.weight": ("U8", (7, 10, 1), bytes(70)),
    }
    oracle.write_folder(tmp_path / "m", [tensors], model.config)
    found = explain(tmp_path / "m")
    assert found.conflicts == (
        "lm_head.weight has shape [7, 10, 1], expected [vocab, hidden]",
        "model.norm.weight has hidden 11, but model.embed_tokens.weight has 10",
    )


def test_incomplete_experts_are_a_problem_not_an_error(
    oracle: Any, model: Any, tmp_path: Path
) -> None:
    del model.per_expert["model.layers.1.mlp.experts.4.up_proj.weight"]
    folder = model.write(tmp_path / "m", "transformers")
    assert "missing 4" in explain(folder, spec=get_spec("qwen3_moe")).problem
