from pathlib import Path
from typing import Any

import pytest

from weight_convert.errors import IncompleteExpertsError
from weight_convert.files import read_catalog
from weight_convert.outputs import PlannedTensor, natural_key
from weight_convert.plan.regroup import as_stored, by_modules, in_memory
from weight_convert.specs import get_spec

SPEC = get_spec("qwen3_moe")
E1 = "model.layers.1.mlp.experts"


def content(tensors: list[PlannedTensor], folder: Path, files: tuple[str, ...]) -> dict[str, Any]:
    contents = [(folder / name).read_bytes() for name in files]
    return {
        t.key: (
            t.dtype,
            t.shape,
            b"".join(
                contents[p.file][p.offset_bytes : p.offset_bytes + p.size_bytes] for p in t.pieces
            ),
        )
        for t in tensors
    }


@pytest.mark.parametrize("source", ["transformers", "fused"])
@pytest.mark.parametrize("to", ["transformers", "fused"])
def test_pieces_join_to_the_tensors_that_numpy_makes(
    model: Any, tmp_path: Path, source: str, to: str
) -> None:
    catalog = read_catalog(model.write(tmp_path / "m", source, num_files=3))
    memory = in_memory(catalog, SPEC, source)
    assert content(memory, catalog.directory, catalog.files) == model.fused, model.seed
    stored = as_stored(memory, SPEC, to)
    expected = model.fused if to == "fused" else model.per_expert
    assert content(stored, catalog.directory, catalog.files) == expected, model.seed


def test_any_range_of_a_tensor_is_cut_from_its_pieces(model: Any, tmp_path: Path) -> None:
    catalog = read_catalog(model.write(tmp_path / "m", "transformers", num_files=3))
    tensor = next(t for t in in_memory(catalog, SPEC, "transformers") if "gate_up" in t.key)
    contents = [(catalog.directory / name).read_bytes() for name in catalog.files]
    whole = model.fused[tensor.key][2]
    for begin in range(0, len(whole), 37):
        for length in (0, 1, 60, 121, len(whole) - begin):
            cut = b"".join(
                contents[p.file][p.offset_bytes : p.offset_bytes + p.size_bytes]
                for p in tensor.cut(begin, min(length, len(whole) - begin))
            )
            assert cut == whole[begin : begin + length], (begin, length, model.seed)


def test_numbers_in_names_sort_as_numbers() -> None:
    names = ["a.10.b", "a.2.b", "a.b", "a.b12", "a.b3", "10", "9", "a"]
    expected = ["9", "10", "a", "a.2.b", "a.10.b", "a.b", "a.b3", "a.b12"]
    assert sorted(names, key=natural_key) == expected


def test_layers_may_differ_in_format(oracle: Any, tmp_path: Path) -> None:
    model = oracle.make_model(num_layers=3)
    tensors = {k: v for k, v in model.per_expert.items() if "layers.2.mlp.experts" not in k}
    tensors |= {k: v for k, v in model.fused.items() if "layers.2.mlp.experts" in k}
    oracle.write_folder(tmp_path / "m", [tensors], model.config)
    memory = in_memory(read_catalog(tmp_path / "m"), SPEC, "transformers")
    assert {t.key for t in memory} == set(model.fused)


def test_experts_in_both_forms_are_refused(oracle: Any, model: Any, tmp_path: Path) -> None:
    oracle.write_folder(tmp_path / "m", [model.per_expert | model.fused], model.config)
    catalog = read_catalog(tmp_path / "m")
    for source in ("transformers", "fused"):
        with pytest.raises(IncompleteExpertsError, match="stored in two forms, such as fused and"):
            as_stored(in_memory(catalog, SPEC, source), SPEC, "transformers")


def test_a_fused_tensor_with_odd_rows_is_refused(oracle: Any, model: Any, tmp_path: Path) -> None:
    tensors = model.fused | {f"{E1}.gate_up_proj": ("U8", (12, 3, 2), bytes(72))}
    oracle.write_folder(tmp_path / "m", [tensors], model.config)
    with pytest.raises(IncompleteExpertsError, match=r"gate_up_proj has shape \[12, 3, 2\]"):
        as_stored(in_memory(read_catalog(tmp_path / "m"), SPEC, "fused"), SPEC, "transformers")


def test_half_bytes_cannot_be_split_between_experts(
    oracle: Any, model: Any, tmp_path: Path
) -> None:
    tensors = model.fused | {f"{E1}.gate_up_proj": ("F4", (12, 2, 3), bytes(36))}
    oracle.write_folder(tmp_path / "m", [tensors], model.config)
    with pytest.raises(IncompleteExpertsError, match=r"cannot be split: F4 .* whole bytes"):
        as_stored(in_memory(read_catalog(tmp_path / "m"), SPEC, "fused"), SPEC, "transformers")


def test_scales_of_experts_go_where_the_experts_go(oracle: Any, tmp_path: Path) -> None:
    model = oracle.make_model(h=256, d=128, dtype="F8_E4M3")
    scales = {
        f"{key}_scale_inv": (
            "F32",
            (-(-shape[0] // 128), -(-shape[1] // 128)),
            bytes([n % 256] * 8),
        )
        for n, (key, (_, shape, _)) in enumerate(model.per_expert.items())
        if ".experts." in key
    }
    oracle.write_folder(tmp_path / "m", [model.per_expert | scales], model.config)
    catalog = read_catalog(tmp_path / "m")
    memory = in_memory(catalog, SPEC, "transformers")
    fused = content(memory, catalog.directory, catalog.files)
    name = f"{E1}.gate_up_proj_scale_inv"
    parts = [
        scales[f"{E1}.{e}.{p}_proj.weight_scale_inv"][2] for e in range(12) for p in ("gate", "up")
    ]
    assert fused[name] == ("F32", (12, 4, 1), b"".join(parts))
    assert fused[f"{E1}.down_proj_scale_inv"][1] == (12, 1, 2)
    back = content(as_stored(memory, SPEC, "transformers"), catalog.directory, catalog.files)
    assert back == model.per_expert | scales, model.seed


def test_tensors_in_the_order_of_the_modules_stand_layer_by_layer(
    oracle: Any, model: Any, tmp_path: Path
) -> None:
    oracle.write_folder(tmp_path / "m", [dict(sorted(model.fused.items()))], model.config)
    memory = in_memory(read_catalog(tmp_path / "m"), SPEC, "fused")
    keys = [t.key for t in sorted(by_modules(memory, SPEC), key=lambda t: t.order)]
    assert keys[0] == "model.embed_tokens.weight"
    assert keys[1:4] == [f"model.layers.0.mlp.{p}_proj.weight" for p in ("gate", "up", "down")]
    assert keys[4:7] == [f"{E1}.gate_up_proj", f"{E1}.down_proj", "model.layers.1.mlp.gate.weight"]
    assert keys[7:9] == ["model.norm.weight", "lm_head.weight"]
    assert len(keys) == 12  # then the three that the spec does not name
