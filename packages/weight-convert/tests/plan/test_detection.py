from math import prod
from pathlib import Path
from typing import Any

import pytest

from weight_convert import ConversionOptions, convert, get_spec, inspect, read_catalog, verify
from weight_convert.errors import UnknownFamilyError, WeightConvertError
from weight_convert.plan import detect_format, spec_of


def test_the_family_comes_from_the_config(oracle: Any, model: Any, tmp_path: Path) -> None:
    folder = model.write(tmp_path / "m", "fused")
    assert spec_of(read_catalog(folder), None).model_type == "qwen3_moe"
    for text in ("{}", None):
        (folder / "config.json").unlink()
        if text is not None:
            (folder / "config.json").write_text(text)
        with pytest.raises(UnknownFamilyError, match=r"names no model_type; .*--model-type"):
            spec_of(read_catalog(folder), None)
        assert spec_of(read_catalog(folder), get_spec("mixtral")).model_type == "mixtral"
        (folder / "config.json").touch()


def test_a_family_that_contradicts_the_config_is_an_error_everywhere(
    model: Any, tmp_path: Path
) -> None:
    folder = model.write(tmp_path / "m", "transformers")
    other = get_spec("gpt_oss")
    for call in (
        lambda: convert(folder, tmp_path / "out", to="fused", spec=other),
        lambda: verify(folder, folder, spec=other),
        lambda: inspect(folder, spec=other),
    ):
        with pytest.raises(WeightConvertError, match=r"'gpt_oss' was asked for, but .*'qwen3_moe'"):
            call()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("form", "turned"), [("fused", False), ("transformers4", True)])
def test_dims_tell_matrices_that_are_transposed_under_the_same_names(
    oracle: Any, tmp_path: Path, form: str, turned: bool
) -> None:
    experts, hidden, width = 3, 6, 3  # gate over up is square, and tells nothing by itself
    shapes = {"gate_up_proj": (experts, 2 * width, hidden), "down_proj": (experts, hidden, width)}
    layer = "model.language_model.layers.0.mlp"
    tensors = {f"{layer}.gate.weight": ("U8", (experts, hidden), bytes(experts * hidden))}
    for name, (outer, rows, columns) in shapes.items():
        shape = (outer, columns, rows) if turned else (outer, rows, columns)
        tensors[f"{layer}.experts.{name}"] = ("U8", shape, bytes(outer * rows * columns))
    config = {"model_type": "qwen3_vl_moe", "text_config": {"num_experts": experts}}
    oracle.write_folder(tmp_path / "m", [tensors], config)
    assert inspect(tmp_path / "m").problem == ""
    assert inspect(tmp_path / "m").format == form


def test_the_format_is_the_one_whose_names_are_there(model: Any, tmp_path: Path) -> None:
    for form in ("transformers", "fused"):
        catalog = read_catalog(model.write(tmp_path / form, form))
        assert detect_format(catalog, get_spec("qwen3_moe")) == form


@pytest.mark.parametrize(
    ("to", "files"),
    [("fused", "pdparams"), ("transformers", "pdparams"), ("paddle", "safetensors")],
)
@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_what_is_written_in_another_kind_of_files_is_read_as_it_stands(
    oracle: Any, tmp_path: Path, to: str, files: Any, dtype: str
) -> None:
    if to == "paddle":
        pytest.importorskip("torch", reason="transposing needs torch")
    source = oracle.make_model(dtype=dtype).write(tmp_path / "m", "transformers")
    convert(source, tmp_path / "a", to=to, options=ConversionOptions(files=files))
    report = convert(tmp_path / "a", tmp_path / "b", to="transformers")
    assert report.source_format == to
    assert oracle.read_folder(tmp_path / "b") == oracle.read_folder(source)


@pytest.mark.parametrize("kind", ["safetensors", "pdparams"])
def test_the_kind_of_files_tells_where_all_matrices_are_square(
    oracle: Any, tmp_path: Path, kind: Any
) -> None:
    experts, size = 4, 4
    layer = "model.layers.0"
    matrices = [f"{layer}.mlp.gate.weight", "lm_head.weight", "model.embed_tokens.weight"]
    matrices += [
        f"{layer}.mlp.experts.{n}.{part}_proj.weight"
        for n in range(experts)
        for part in ("gate", "up", "down")
    ]
    tensors = {key: ("U8", (size, size), bytes(range(size * size))) for key in matrices}
    config = {"model_type": "qwen3_moe", "num_experts": experts}
    oracle.write_folder(tmp_path / "m", [tensors], config)
    options = ConversionOptions(files=kind)
    convert(tmp_path / "m", tmp_path / "kind", to="transformers", options=options)
    found = detect_format(read_catalog(tmp_path / "kind"), get_spec("qwen3_moe"))
    assert found == ("paddle" if kind == "pdparams" else "transformers")


def test_a_square_head_alone_makes_no_other_program_s_files(oracle: Any, tmp_path: Path) -> None:
    layer = "model.layers.0.mlp"
    shapes = {"model.embed_tokens.weight": (4, 4), "lm_head.weight": (4, 4)}
    shapes |= {f"{layer}.gate.weight": (3, 4), f"{layer}.experts.gate_up_proj": (3, 4, 4)}
    shapes[f"{layer}.experts.down_proj"] = (3, 4, 2)
    tensors = {key: ("U8", shape, bytes(prod(shape))) for key, shape in shapes.items()}
    config = {"model_type": "deepseek_v3", "n_routed_experts": 3}
    oracle.write_folder(tmp_path / "m", [tensors], config)
    assert inspect(tmp_path / "m").format == "fused"
    pytest.importorskip("torch", reason="transposing needs torch")
    options = ConversionOptions(files="safetensors")
    convert(tmp_path / "m", tmp_path / "paddle", to="paddle", options=options)
    report = convert(tmp_path / "paddle", tmp_path / "back", to="fused")
    assert report.source_format == "paddle" and verify(tmp_path / "m", tmp_path / "back").equal


def test_one_matrix_of_another_shape_turns_no_directory(oracle: Any, tmp_path: Path) -> None:
    model = oracle.make_model()
    dtype, shape, data = model.per_expert["lm_head.weight"]
    model.per_expert["lm_head.weight"] = (dtype, shape[::-1], data)
    source = model.write(tmp_path / "m", "transformers")
    assert inspect(source).format == "transformers"
    options = ConversionOptions(files="pdparams")
    convert(source, tmp_path / "pd", to="transformers", options=options)
    assert inspect(tmp_path / "pd").format == "transformers"
