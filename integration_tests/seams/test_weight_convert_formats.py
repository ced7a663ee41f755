"""Formats of other programs: each tensor against a reference in torch, from published key lists.

The lists are facts of the programs that are named with them; what makes the tensors here shares no
code with weight-convert. Tiny random models of transformers, twelve experts, no square expert.
"""

import json
import pickle
import random
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from moe_pipeline import family_of
from ranktest import run_ranks
from weight_convert import ConversionOptions, convert, get_spec, inspect, read_catalog, verify
from weight_convert.specs import family_names

transformers = pytest.importorskip("transformers", reason="the oracle needs transformers")
# NVIDIA-NeMo/Megatron-Bridge, src/megatron/bridge/models/: qwen/qwen3_moe_bridge.py (3ec0b0aa),
# qwen/qwen2_bridge.py, qwen/qwen3_next_bridge.py, mixtral/mixtral_bridge.py (1d5b919b),
# olmoe/olmoe_bridge.py (5c5ae23c), deepseek/common.py (0e15d4d3), glm/glm45_bridge.py (0fe9cb1d),
# ernie/ernie_45_bridge.py (ea7ecb4c), minimax_m2/minimax_m2_bridge.py (39b79eb7),
# qwen_vl/qwen3_vl_bridge.py (0e125d8f): its decoder under "language_model.".
MEGATRON = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
    "decoder.layers.*.self_attention.linear_proj.weight": "model.layers.*.self_attn.o_proj.weight",
    "decoder.layers.*.self_attention.linear_q_proj.weight": (
        "model.layers.*.self_attn.q_proj.weight"
    ),
    "decoder.layers.*.self_attention.linear_q_down_proj.weight": (
        "model.layers.*.self_attn.q_a_proj.weight"
    ),
    "decoder.layers.*.self_attention.linear_q_up_proj.weight": (
        "model.layers.*.self_attn.q_b_proj.weight"
    ),
    "decoder.layers.*.self_attention.linear_q_up_proj.layer_norm_weight": (
        "model.layers.*.self_attn.q_a_layernorm.weight"
    ),
    "decoder.layers.*.self_attention.linear_kv_down_proj.weight": (
        "model.layers.*.self_attn.kv_a_proj_with_mqa.weight"
    ),
    "decoder.layers.*.self_attention.linear_kv_up_proj.weight": (
        "model.layers.*.self_attn.kv_b_proj.weight"
    ),
    "decoder.layers.*.self_attention.linear_kv_up_proj.layer_norm_weight": (
        "model.layers.*.self_attn.kv_a_layernorm.weight"
    ),
    "decoder.layers.*.self_attention.q_layernorm.weight": "model.layers.*.self_attn.q_norm.weight",
    "decoder.layers.*.self_attention.k_layernorm.weight": "model.layers.*.self_attn.k_norm.weight",
    "decoder.layers.*.mlp.router.weight": "model.layers.*.mlp.gate.weight",
    "decoder.layers.*.mlp.router.expert_bias": "model.layers.*.mlp.e_score_correction_bias",
    "decoder.layers.*.mlp.shared_experts.gate_weight": (
        "model.layers.*.mlp.shared_expert_gate.weight"
    ),
    "decoder.layers.*.mlp.linear_fc2.weight": "model.layers.*.mlp.down_proj.weight",
}
# deepseek-ai/DeepSeek-V3, inference/convert.py (07de76f5): the module before the last field.
DEEPSEEK = {
    "embed_tokens": "embed",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "q_proj": "wq",
    "q_a_proj": "wq_a",
    "q_a_layernorm": "q_norm",
    "q_b_proj": "wq_b",
    "kv_a_proj_with_mqa": "wkv_a",
    "kv_a_layernorm": "kv_norm",
    "kv_b_proj": "wkv_b",
    "o_proj": "wo",
    "gate": "gate",
    "gate_proj": "w1",
    "down_proj": "w2",
    "up_proj": "w3",
    "norm": "norm",
    "lm_head": "head",
}
# PaddlePaddle/PaddleNLP, paddlenlp/transformers/FAMILY/modeling.py, base_model_prefix; every Linear
# is "transpose" in _get_name_mappings, embeddings and vectors are not.
PADDLE = {
    "qwen2_moe": "qwen2_moe",  # 00c76f50
    "qwen3_moe": "model",  # 3fe4936d
    "mixtral": "mixtral",  # 0558a1b5
    "deepseek_v2": "deepseek_v2",
    "deepseek_v3": "deepseek_v3",
}
Tensors = dict[str, torch.Tensor]
MakeModel = Callable[[str], tuple[int, Any]]
Saved = Callable[[str, Path], tuple[int, Tensors, dict[str, Any]]]


def pairs(format_name: str) -> list[str]:
    return [name for name in family_names() if format_name in get_spec(name).formats]


@pytest.fixture
def saved(make_model: MakeModel) -> Saved:
    """Writes a tiny model as save_pretrained does; returns its seed, tensors and config."""

    def save(model_type: str, folder: Path) -> tuple[int, Tensors, dict[str, Any]]:
        seed, model = make_model(model_type)
        model.save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text())
        return seed, load_file(folder / "model.safetensors"), config

    return save


def in_modules(tensors: Tensors) -> Tensors:
    """Mixtral's files under the names of its modules, as others have theirs; one router's bias."""
    names = {"block_sparse_moe": "mlp", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    made = {
        ".".join(names.get(field, field) for field in key.split(".")): tensor
        for key, tensor in tensors.items()
    }
    return {
        re.sub(r"mlp\.(gate|moe_statics)\.e_score", "mlp.e_score", key): tensor.squeeze(0)
        if "e_score" in key
        else tensor
        for key, tensor in made.items()
    }


def by_experts(tensors: Tensors) -> Tensors:
    """Fused experts as one tensor each, of the decoder of a model of text and images."""
    made = {}
    for key, tensor in tensors.items():
        name = key.replace("model.language_model.", "model.")
        layer, is_fused, part = name.partition("mlp.experts.")
        parts = {"down_proj": ["down_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
        if not is_fused:
            made[name] = tensor
            continue
        for e, expert in enumerate(tensor):
            halves = expert.chunk(len(parts[part]))
            for inner, half in zip(parts[part], halves, strict=True):
                made[f"{layer}mlp.experts.{e}.{inner}.weight"] = half
    return made


def megatron(tensors: Tensors, config: dict[str, Any], *, sequential: bool) -> Tensors:
    if "text_config" in config:
        vision = {key: tensor for key, tensor in tensors.items() if ".visual." in key}
        text = by_experts({key: tensor for key, tensor in tensors.items() if key not in vision})
        made = megatron(text, config["text_config"], sequential=sequential)
        return vision | {f"language_model.{key}": tensor for key, tensor in made.items()}
    left, made = in_modules(tensors), {}
    layers = range(config["num_hidden_layers"])
    for theirs, ours in MEGATRON.items():
        for n in layers if "*" in ours else (0,):
            key, name = ours.replace("*", str(n)), theirs.replace("*", str(n))
            is_separate = "linear_q_proj" in name and f"{key[:-13]}k_proj.weight" in left
            if key in left and not is_separate:
                made[name] = left.pop(key)
    for n in layers:
        of, to = f"model.layers.{n}.", f"decoder.layers.{n}."
        is_latent = f"{to}self_attention.linear_kv_up_proj.weight" in made
        before = "input_layernorm.weight"
        made[to + (before if is_latent else "self_attention.linear_qkv.layer_norm_weight")] = (
            left.pop(of + before)
        )
        is_sparse = f"{to}mlp.router.weight" in made
        norm = "pre_mlp_layernorm.weight" if is_sparse else "mlp.linear_fc1.layer_norm_weight"
        made[to + norm] = left.pop(f"{of}post_attention_layernorm.weight")
        made |= packed_heads(left, of, to, config["num_key_value_heads"])
        made |= gated(left, of, to)
        made |= experts(left, of, to, sequential) if is_sparse else {}
    assert not left, sorted(left)
    return made


def packed_heads(left: Tensors, of: str, to: str, groups: int) -> Tensors:
    made = {}
    for end in ("weight", "bias"):
        if f"{of}self_attn.k_proj.{end}" in left:
            parts = [left.pop(f"{of}self_attn.{x}_proj.{end}") for x in "qkv"]
            by_group = [p.view(groups, p.shape[0] // groups, *p.shape[1:]) for p in parts]
            packed = torch.cat(by_group, dim=1).flatten(0, 1)
            made[f"{to}self_attention.linear_qkv.{end}"] = packed
    return made


def gated(left: Tensors, of: str, to: str) -> Tensors:
    made = {}
    for inner in ("", "shared_expert.", "shared_experts."):
        if f"{of}mlp.{inner}gate_proj.weight" in left:
            outer = "shared_experts." if inner else ""
            both = [left.pop(f"{of}mlp.{inner}{x}_proj.weight") for x in ("gate", "up")]
            made[f"{to}mlp.{outer}linear_fc1.weight"] = torch.cat(both)
            if inner:
                down = left.pop(f"{of}mlp.{inner}down_proj.weight")
                made[f"{to}mlp.{outer}linear_fc2.weight"] = down
    return made


def experts(left: Tensors, of: str, to: str, sequential: bool) -> Tensors:
    made = {}
    for e in range(12):
        gate, up, down = (
            left.pop(f"{of}mlp.experts.{e}.{x}_proj.weight") for x in ("gate", "up", "down")
        )
        for fc, value in (("fc1", torch.cat((gate, up))), ("fc2", down)):
            name = f"local_experts.{e}.linear_{fc}.weight" if sequential else ""
            made[f"{to}mlp.experts.{name or f'linear_{fc}.weight{e}'}"] = value
    return made


def deepseek(tensors: Tensors) -> Tensors:
    made = {}
    for key, tensor in tensors.items():
        fields = key.removeprefix("model.").split(".")
        fields = [{"self_attn": "attn", "mlp": "ffn"}.get(field, field) for field in fields]
        fields[-2] = DEEPSEEK[fields[-2]]
        ends = {"weight_scale_inv": "scale", "e_score_correction_bias": "bias"}
        fields[-1] = ends.get(fields[-1], fields[-1])
        made[".".join(fields)] = tensor
    return made


def paddle(tensors: Tensors, prefix: str) -> Tensors:
    return {
        re.sub(r"^model\.", f"{prefix}.", key): tensor.t()
        if tensor.dim() == 2 and "embed_tokens" not in key
        else tensor
        for key, tensor in tensors.items()
    }


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(found: Tensors, expected: Tensors, seed: int) -> None:
    assert found.keys() == expected.keys(), (found.keys() ^ expected.keys(), seed)
    for key, tensor in expected.items():
        assert found[key].shape == tensor.shape, (key, seed)
        assert bytes_of(found[key]) == bytes_of(tensor), (key, seed)


def assert_comes_back(source: Path, made: Path, seed: int, unknown: int = 0) -> None:
    """Converted back, the files are transformers' own; every format of the family leads there."""
    back = made.with_name(f"{made.name}-back")
    report = convert(made, back, to="transformers")
    assert len(report.unknown_keys) == unknown, seed
    assert verify(source, made).equal and verify(made, back).equal, seed
    for name in ("model.safetensors", "config.json"):
        assert (back / name).read_bytes() == (source / name).read_bytes(), (name, seed)


@pytest.mark.parametrize("model_type", pairs("megatron"))
def test_megatron_files_are_the_tensors_of_its_key_list(
    model_type: str, saved: Saved, tmp_path: Path
) -> None:
    seed, tensors, config = saved(model_type, tmp_path / "hf")
    for name in sorted({"megatron", "megatron_sequential"} & get_spec(model_type).formats.keys()):
        report = convert(tmp_path / "hf", tmp_path / name, to=name)
        expected = megatron(tensors, config, sequential=name == "megatron_sequential")
        assert not report.is_experimental and not report.unknown_keys
        assert_same(load_file(tmp_path / name / "model.safetensors"), expected, seed)
        assert inspect(tmp_path / name).format == name
        assert_comes_back(tmp_path / "hf", tmp_path / name, seed)


@pytest.mark.parametrize("name", ["megatron", "megatron_sequential"])
@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm4_moe"])
def test_layers_of_multi_token_prediction_are_counted_anew_in_megatron(
    model_type: str, name: str, saved: Saved, tmp_path: Path
) -> None:
    seed, tensors, config = saved(model_type, tmp_path / "hf")
    last = "model.layers.1."
    block = {k.replace(last, "model.layers.2."): v + 1 for k, v in tensors.items() if last in k}
    own = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj"}
    own |= {"shared_head.norm": "final_layernorm"}
    theirs = {f"model.layers.2.{key}.weight": torch.randn(3, 5) for key in own}
    carried = {
        f"model.layers.2.{key}.weight": torch.randn(40, 32)
        for key in ("embed_tokens", "shared_head.head")  # Megatron-Core shares the model's
    }
    path = tmp_path / "hf" / "model.safetensors"
    save_file(tensors | block | theirs | carried, path, metadata={"format": "pt"})
    report = convert(tmp_path / "hf", tmp_path / "out", to=name)
    assert set(report.unknown_keys) == carried.keys()
    one_more = config | {"num_hidden_layers": 3}
    expected = {
        key.replace("decoder.layers.2.", "mtp.layers.0.mtp_model_layer."): tensor
        for key, tensor in megatron(
            tensors | block, one_more, sequential="sequential" in name
        ).items()
    }
    for key, tensor in theirs.items():
        inner = key.removeprefix("model.layers.2.").removesuffix(".weight")
        expected[f"mtp.layers.0.{own[inner]}.weight"] = tensor
    assert_same(load_file(tmp_path / "out/model.safetensors"), expected | carried, seed)
    assert_comes_back(tmp_path / "hf", tmp_path / "out", seed)
    del config["num_hidden_layers"]
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="no num_hidden_layers; add it to the config"):
        convert(tmp_path / "out", tmp_path / "again", to="transformers")


@pytest.mark.parametrize("model_type", pairs("deepseek"))
def test_deepseek_files_are_the_tensors_of_its_key_list(
    model_type: str, saved: Saved, tmp_path: Path
) -> None:
    seed, tensors, _ = saved(model_type, tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "deepseek", to="deepseek")
    found = load_file(tmp_path / "deepseek" / "model0-mp1.safetensors")
    assert_same(found, deepseek(tensors), seed)
    assert_comes_back(tmp_path / "hf", tmp_path / "deepseek", seed)


def test_scales_and_unknown_tensors_go_with_deepseeks_names(saved: Saved, tmp_path: Path) -> None:
    seed, tensors, config = saved("deepseek_v3", tmp_path / "hf")
    tensors = {k: v for k, v in tensors.items() if ".experts." in k or "layers" not in k}
    for key in [key for key in tensors if ".experts." in key]:
        rows, columns = tensors[key].shape
        tensors[key] = tensors[key].to(torch.float8_e4m3fn)
        tensors[f"{key}_scale_inv"] = torch.randn(-(-rows // 4), -(-columns // 4))
    tensors["model.layers.1.mlp.gate.weight"] = torch.randn(12, 32)
    expected = deepseek(tensors)
    unknown = {"model.unheard_of": torch.tensor([float("nan"), -0.0])}
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [4, 4]}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True))
    save_file(tensors | unknown, tmp_path / "hf/model.safetensors", metadata={"format": "pt"})
    convert(tmp_path / "hf", tmp_path / "out", to="deepseek")
    found = load_file(tmp_path / "out" / "model0-mp1.safetensors")
    assert_same(found, expected | unknown, seed)
    assert_comes_back(tmp_path / "hf", tmp_path / "out", seed, unknown=1)


@pytest.mark.parametrize("model_type", pairs("paddle"))
def test_paddle_files_are_the_transposed_tensors_of_its_key_list(
    model_type: str, saved: Saved, tmp_path: Path
) -> None:
    seed, tensors, _ = saved(model_type, tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "paddle", to="paddle")
    state = pickle.loads((tmp_path / "paddle" / "model_state.pdparams").read_bytes())
    assert state.pop("StructuredToParameterName@@") == {}
    found = {key: torch.from_numpy(value.copy()) for key, value in state.items()}
    assert_same(found, paddle(tensors, PADDLE[model_type]), seed)
    assert_comes_back(tmp_path / "hf", tmp_path / "paddle", seed)
    convert(tmp_path / "hf", tmp_path / "megatron", to="megatron")
    convert(tmp_path / "paddle", tmp_path / "megatron2", to="megatron")
    packed = [(tmp_path / n / "model.safetensors").read_bytes() for n in ("megatron", "megatron2")]
    assert packed[0] == packed[1], seed  # rows of matrices that are transposed on the way


def test_paddles_bfloat16_and_what_numpy_pickles_are_read(saved: Saved, tmp_path: Path) -> None:
    seed, tensors, config = saved("mixtral", tmp_path / "hf")
    tensors = {key: value.bfloat16() for key, value in tensors.items()}
    (tmp_path / "pd").mkdir()
    config.pop("dtype")
    config["architectures"] = ["MixtralForCausalLMPipe"]
    (tmp_path / "pd" / "config.json").write_text(json.dumps(config))
    arrays = {
        key: np.ascontiguousarray(value.contiguous().view(torch.uint16).numpy())
        for key, value in paddle(tensors, "mixtral").items()
    }
    path = tmp_path / "pd" / "model_state.pdparams"
    path.write_bytes(pickle.dumps(arrays, protocol=4))
    convert(tmp_path / "pd", tmp_path / "out", to="transformers")
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), tensors, seed)
    told = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (told["architectures"], told["dtype"]) == (["MixtralForCausalLM"], "bfloat16")
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")


@pytest.mark.parametrize("model_type", pairs("moe_layer"))
def test_moe_layer_files_are_what_moe_pipeline_makes_of_blocks(
    model_type: str, make_model: MakeModel, tmp_path: Path
) -> None:
    seed, model = make_model(model_type)
    model.save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "own", to="moe_layer")
    found = load_file(tmp_path / "own" / "model.safetensors")
    prefix = "model.layers.1.mlp."
    block = {k.removeprefix(prefix): v for k, v in model.state_dict().items() if prefix in k}
    expected = family_of(model_type).from_transformers(block)
    assert_same(
        {k.removeprefix(prefix): v for k, v in found.items() if prefix in k}, expected, seed
    )
    assert_comes_back(tmp_path / "hf", tmp_path / "own", seed)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("limit", [40_000, 10**9])
@pytest.mark.parametrize("kind", ["bin", "dcp"])
def test_torch_loads_the_files_that_are_written(
    kind: str, limit: int, saved: Saved, tmp_path: Path
) -> None:
    seed, tensors, _ = saved("qwen3_moe", tmp_path / "hf")
    tensors["model.f8"] = torch.randn(3, 5).to(torch.float8_e4m3fn)
    tensors["model.scalar"] = torch.tensor(3.0, dtype=torch.float64)
    tensors["model.empty"] = torch.zeros(0, 4)
    save_file(tensors, tmp_path / "hf/model.safetensors", metadata={"format": "pt"})
    options = ConversionOptions(files=kind, max_shard_bytes=limit)
    plan = convert(
        tmp_path / "hf", tmp_path / "out", to="transformers", options=options, dry_run=True
    )
    report = convert(tmp_path / "hf", tmp_path / "out", to="transformers", options=options)
    assert plan.files == report.files
    assert all((tmp_path / "out" / n).stat().st_size == size for n, size in report.files)
    found: Tensors = {}
    if kind == "bin":
        for path in (tmp_path / "out").glob("*.bin"):
            found |= torch.load(path, weights_only=True)
            assert zipfile.ZipFile(path).testzip() is None
    else:
        found = {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}
        dcp.load(found, checkpoint_id=tmp_path / "out", no_dist=True)
    assert_same(found, tensors, seed)
    assert_comes_back(tmp_path / "hf", tmp_path / "out", seed, unknown=3)


def test_files_of_torch_save_are_read(saved: Saved, tmp_path: Path) -> None:
    seed, tensors, config = saved("olmoe", tmp_path / "hf")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    random.Random(seed).shuffle(names)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2])):
        state = {key: torch.nn.Parameter(tensors[key]) for key in part}
        file = f"pytorch_model-{number}.bin"
        torch.save(state, tmp_path / "bin" / file)
        weight_map |= dict.fromkeys(part, file)
    index = tmp_path / "bin" / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    convert(tmp_path / "bin", tmp_path / "out", to="transformers")
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), tensors, seed)


def save_on_ranks(folder: Path, tensors: Tensors) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    placements = [(Shard(0), Shard(1)), (Shard(1), Shard(0)), (Replicate(), Shard(0))]
    state = {}
    for number, (key, tensor) in enumerate(tensors.items()):
        wanted = placements[number % 3] if tensor.dim() > 1 else (Replicate(), Shard(0))
        state[key] = distribute_tensor(tensor, mesh, wanted)
    dcp.save({"model": state, "step": 3}, checkpoint_id=folder)


def test_a_checkpoint_of_four_ranks_is_one_model(tmp_path: Path) -> None:
    torch.manual_seed(seed := random.randrange(2**32))
    shapes = [(7, 10), (9, 6), (5,), (3, 5, 8), (1, 4)]
    tensors = {f"model.x{n}": torch.randn(shape) for n, shape in enumerate(shapes)}
    run_ranks(lambda rank, size: save_on_ranks(tmp_path / "dcp", tensors), 4)
    catalog = read_catalog(tmp_path / "dcp")
    assert [item.name for item in catalog.left_out] == ["1 entries of .metadata"]
    files = [(tmp_path / "dcp" / name).read_bytes() for name in catalog.files]
    for key, tensor in tensors.items():
        stored = catalog.tensors[key]
        ranges = stored.ranges or ((stored.file, stored.offset_bytes, stored.size_bytes),)
        found = b"".join(files[file][at : at + size] for file, at, size in ranges)
        assert (stored.shape, found) == (tuple(tensor.shape), bytes_of(tensor)), (key, seed)
