import json
import random
from pathlib import Path
from typing import Any

import pytest

from weight_convert.errors import IncompleteExpertsError, WeightConvertError
from weight_convert.files.catalog import read_catalog
from weight_convert.plan import ConversionOptions, ConversionPlan, plan_conversion
from weight_convert.specs import get_spec

SPEC = get_spec("qwen3_moe")


def plan_of(model: Any, folder: Path, *, form: str, num_files: int = 1, **options: Any) -> Any:
    catalog = read_catalog(model.write(folder, form, num_files=num_files))
    to = options.pop("to")
    return plan_conversion(catalog, SPEC, to=to, options=ConversionOptions(**options))


@pytest.mark.parametrize("form", ["transformers", "fused"])
@pytest.mark.parametrize("to", ["transformers", "fused"])
def test_extents_tile_each_target_and_read_each_source_byte_once(
    oracle: Any, tmp_path: Path, form: str, to: str
) -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    model = oracle.make_model(num_layers=3, h=rng.randint(1, 9), d=rng.randint(1, 9))
    limit = rng.choice([1, 100, 1000, 10**9])
    source = tmp_path / "m"
    plan: ConversionPlan = plan_of(
        model, source, form=form, num_files=rng.randint(1, 6), to=to, max_shard_bytes=limit
    )
    for target in plan.targets:
        end = len(target.header)
        for extent in target.extents:
            assert extent.target_offset == end, (seed, model.seed)
            assert extent.size_bytes > 0
            end += extent.size_bytes
        assert end == target.size_bytes
    read = sorted(
        (extent.file, extent.source_offset, extent.size_bytes)
        for target in plan.targets
        for extent in target.extents
    )
    for number, name in enumerate(plan.sources):
        content = (source / name).read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        for _, offset, size_bytes in (extent for extent in read if extent[0] == number):
            assert offset == end, (seed, model.seed)
            end += size_bytes
        assert end == len(content), (seed, model.seed)


def test_no_file_exceeds_the_limit_unless_one_tensor_does(oracle: Any, tmp_path: Path) -> None:
    model = oracle.make_model(num_layers=4)
    plan = plan_of(model, tmp_path / "m", form="transformers", to="fused", max_shard_bytes=1500)
    sizes = [target.size_bytes - len(target.header) for target in plan.targets]
    assert len(sizes) > 3
    assert all(
        size <= 1500 or len(target.keys) == 1
        for size, target in zip(sizes, plan.targets, strict=True)
    ), model.seed
    total = len(plan.targets)
    assert [target.name for target in plan.targets] == [
        f"model-{number:05d}-of-{total:05d}.safetensors" for number in range(1, total + 1)
    ]


def test_files_follow_the_layers_in_natural_order(oracle: Any, tmp_path: Path) -> None:
    model = oracle.make_model(num_layers=12, h=1, d=2)
    plan = plan_of(model, tmp_path / "m", form="fused", to="transformers", max_shard_bytes=60)
    layers = [
        int(key.split(".")[2])
        for target in plan.targets
        for key in sorted(target.keys)
        if ".experts." in key
    ]
    assert layers == sorted(layers)


def test_neighbours_on_both_sides_become_one_extent(oracle: Any, tmp_path: Path) -> None:
    model = oracle.make_model()
    ordered = dict(sorted(model.per_expert.items()))  # as transformers writes: gate beside up
    oracle.write_folder(tmp_path / "m", [ordered], model.config)
    plan = plan_conversion(read_catalog(tmp_path / "m"), SPEC, to="fused")
    (target,) = plan.targets
    # 12 experts, gate and up joined, and 12 downs; the rest is shared tensors
    assert 24 <= len(target.extents) <= 24 + 11


def test_the_index_counts_elements_and_bytes_and_keeps_other_facts(
    model: Any, tmp_path: Path
) -> None:
    folder = model.write(tmp_path / "m", "transformers", num_files=2)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["metadata"] = {"total_size": 1, "written_by": ["someone"]}
    path.write_text(json.dumps(index))
    plan = plan_conversion(
        read_catalog(folder), SPEC, to="fused", options=ConversionOptions(max_shard_bytes=2000)
    )
    assert plan.index is not None
    made = json.loads(plan.index)
    sizes = [(len(data), int(len(data) and 1)) for _, _, data in model.fused.values()]
    assert made["metadata"]["total_size"] == sum(size for size, _ in sizes) == plan.data_bytes
    assert made["metadata"]["written_by"] == ["someone"]
    assert set(made["weight_map"]) == set(model.fused)
    for target in plan.targets:
        assert {made["weight_map"][key] for key in target.keys} == {target.name}
    # one file, yet the fact stays
    single = plan_conversion(read_catalog(folder), SPEC, to="fused")
    assert [target.name for target in single.targets] == ["model.safetensors"]
    assert single.index is not None
    assert json.loads(single.index)["metadata"]["written_by"] == ["someone"]


def test_a_single_file_needs_no_index(model: Any, tmp_path: Path) -> None:
    assert (
        plan_of(model, tmp_path / "m", form="fused", num_files=2, to="transformers").index is None
    )


def test_regrouped_tensors_are_counted(model: Any, tmp_path: Path) -> None:
    catalog = read_catalog(model.write(tmp_path / "m", "transformers"))
    assert plan_conversion(catalog, SPEC, to="fused").num_regrouped == 2
    assert plan_conversion(catalog, SPEC, to="transformers").num_regrouped == 0
    catalog = read_catalog(model.write(tmp_path / "n", "fused"))
    assert plan_conversion(catalog, SPEC, to="transformers").num_regrouped == 36


def test_tensors_of_single_experts_that_no_rule_names_are_refused(
    oracle: Any, model: Any, tmp_path: Path
) -> None:
    scale = "model.layers.1.mlp.experts.3.gate_proj.qweight"
    tensors = model.per_expert | {scale: ("F32", (1,), b"abcd")}
    oracle.write_folder(tmp_path / "m", [tensors], model.config)
    with pytest.raises(IncompleteExpertsError, match=f"1 tensors of single experts .*{scale}"):
        plan_conversion(read_catalog(tmp_path / "m"), SPEC, to="fused")


def test_unknown_tensors_are_carried_by_name_or_refused(model: Any, tmp_path: Path) -> None:
    catalog = read_catalog(model.write(tmp_path / "m", "transformers"))
    plan = plan_conversion(catalog, SPEC, to="fused")
    assert set(plan.unknown_keys) == {
        "model.mtp.unheard_of",
        "model.layers.1.self_attn.step",
        "model.layers.1.self_attn.empty",
    }
    assert set(plan.unknown_keys) <= set(plan.targets[0].keys)
    with pytest.raises(ValueError, match="3 tensors are not named by the spec of qwen3_moe"):
        plan_conversion(catalog, SPEC, to="fused", options=ConversionOptions(unknown="refuse"))


def test_tensors_for_which_the_target_has_no_name_are_listed_or_refused(
    oracle: Any, model: Any, tmp_path: Path
) -> None:
    bias = "model.layers.1.self_attn.o_proj.bias"  # the spec knows it, Megatron's list does not
    tensors = model.per_expert | {bias: ("U8", (2,), b"ab")}
    oracle.write_folder(tmp_path / "m", [tensors], model.config)
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1}
    (tmp_path / "m" / "config.json").write_text(json.dumps(model.config | heads))
    catalog = read_catalog(tmp_path / "m")
    assert bias in plan_conversion(catalog, SPEC, to="megatron").unknown_keys
    assert bias not in plan_conversion(catalog, SPEC, to="fused").unknown_keys
    with pytest.raises(ValueError, match=r"4 tensors .* have no name in the format megatron, for"):
        options = ConversionOptions(unknown="refuse")
        plan_conversion(catalog, SPEC, to="megatron", options=options)


def test_buffers_are_no_parameters_of_the_index(oracle: Any, tmp_path: Path) -> None:
    tensors = {
        f"model.layers.0.mlp.experts.{e}.{part}_proj.weight": ("U8", (1, 2), b"ab")
        for e in range(12)
        for part in ("gate", "up", "down")
    } | {"model.layers.0.mlp.gate.e_score_correction_bias": ("F32", (12,), bytes(48))}
    oracle.write_folder(tmp_path / "m", [tensors], {"model_type": "deepseek_v3"})
    options = ConversionOptions(max_shard_bytes=60)
    plan = plan_conversion(read_catalog(tmp_path / "m"), None, to="fused", options=options)
    assert json.loads(plan.index or b"")["metadata"] == {"total_parameters": 72, "total_size": 120}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"to": "per-expert"}, "has no format 'per-expert'; it has transformers, megatron"),
        ({"to": "fused", "source_format": "bin"}, "has no format 'bin'"),
        ({"to": "fused", "unknown": "drop"}, "unknown='drop'; expected"),
        ({"to": "fused", "max_shard_bytes": 0}, "max_shard_bytes=0; expected at least 1"),
    ],
)
def test_bad_options_are_refused(model: Any, tmp_path: Path, options: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        plan_of(model, tmp_path / "m", form="fused", **options)


def small_model(oracle: Any, folder: Path, model_type: str, bias: str, mlp: str) -> Any:
    """One layer under the names of transformers' files, with a choosing bias in float32."""
    tensors = {
        f"model.layers.0.{mlp}.experts.{e}.{part}.weight": ("F32", (1, 2), bytes(8))
        for e in range(3)
        for part in (("w1", "w3") if mlp == "block_sparse_moe" else ("gate_proj", "up_proj"))
    } | {
        f"model.layers.0.{mlp}.experts.{e}.{'w2' if mlp != 'mlp' else 'down_proj'}.weight": (
            "F32",
            (2, 1),
            bytes(8),
        )
        for e in range(3)
    }
    tensors[f"model.layers.0.{mlp}.gate.weight"] = ("F32", (3, 2), bytes(24))
    tensors[f"model.layers.0.{mlp}.{bias}"] = ("F32", (3,), bytes(12))
    tensors["model.layers.0.empty"] = ("F32", (0, 2), b"")
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    config = {"model_type": model_type, "num_local_experts": 3, "n_routed_experts": 3} | sizes
    oracle.write_folder(folder, [tensors], config)
    return read_catalog(folder)


@pytest.mark.parametrize(
    ("model_type", "bias", "mlp"),
    [
        ("deepseek_v3", "gate.e_score_correction_bias", "mlp"),
        ("glm4_moe", "gate.e_score_correction_bias", "mlp"),
        ("minimax_m2", "e_score_correction_bias", "block_sparse_moe"),
    ],
)
def test_a_cast_leaves_buffers_as_they_are_under_the_names_of_every_format(
    oracle: Any, tmp_path: Path, model_type: str, bias: str, mlp: str
) -> None:
    catalog = small_model(oracle, tmp_path / "m", model_type, bias, mlp)
    for to, form in get_spec(model_type).formats.items():
        options = ConversionOptions(dtype="bfloat16", files="safetensors")
        plan = plan_conversion(catalog, None, to=to, options=options)
        fields = {
            key: field["dtype"]
            for target in plan.targets
            for key, field in json.loads(target.header[8:]).items()
            if key != "__metadata__"
        }
        kept = {key for key, dtype in fields.items() if dtype == "F32"}
        assert len(kept) == 1 and all("bias" in key for key in kept), (form.name, fields)
        assert set(fields.values()) == {"F32", "BF16"}, form.name


def test_a_cast_of_fp8_is_refused_as_it_would_round_the_scales(oracle: Any, tmp_path: Path) -> None:
    model = oracle.make_model(dtype="F8_E4M3")
    with pytest.raises(WeightConvertError, match=r"holds fp8 codes, .*; dequantise the model fi"):
        plan_of(model, tmp_path / "m", form="transformers", to="transformers", dtype="float16")


def test_empty_options_of_another_type_are_not_taken_for_the_defaults(
    oracle: Any, tmp_path: Path
) -> None:
    mlp, bias = "mlp", "gate.e_score_correction_bias"
    catalog = small_model(oracle, tmp_path / "m", "deepseek_v3", bias, mlp)
    with pytest.raises(TypeError, match="options must be ConversionOptions, got the dict"):
        plan_conversion(catalog, None, to="fused", options={})  # type: ignore[arg-type]
