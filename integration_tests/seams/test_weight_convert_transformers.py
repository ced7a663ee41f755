"""weight-convert against transformers and safetensors: what they write, what they read."""

import itertools
import json
import random
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from weight_convert import ConversionOptions, convert, get_spec, inspect, read_header, verify

transformers = pytest.importorskip("transformers", reason="the oracle needs transformers")

SPEC = get_spec("qwen3_moe")
WEIGHTS = "model*.safetensors*"


def make_model(
    dtype: torch.dtype = torch.float32, **changes: object
) -> tuple[int, torch.nn.Module]:
    """Make a tiny Qwen3-MoE with distinct dims, 12 experts and one dense layer; return its seed."""
    seed = random.randrange(2**32)
    torch.manual_seed(seed)
    options: dict[str, object] = {
        "vocab_size": 48,
        "hidden_size": 16,
        "intermediate_size": 24,
        "moe_intermediate_size": 20,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 12,
        "num_experts_per_tok": 2,
        "mlp_only_layers": [1],
    }
    config = transformers.Qwen3MoeConfig(**(options | changes))
    model = transformers.Qwen3MoeForCausalLM(config).to(dtype).eval()
    return seed, model


def load_folder(folder: Path) -> dict[str, torch.Tensor]:
    """Load all weights with the safetensors library."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def as_bytes(tensor: torch.Tensor) -> bytes:
    """Return a tensor's bytes in row-major order."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def logits(model: torch.nn.Module) -> torch.Tensor:
    """Run a model on fixed tokens."""
    with torch.no_grad():
        return model(input_ids=torch.arange(10)[None]).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_shard_size", ["20KB", "1GB"])
def test_saved_experts_fuse_to_the_state_dict_and_split_back_to_the_same_files(
    tmp_path: Path, dtype: torch.dtype, max_shard_size: str
) -> None:
    seed, model = make_model(dtype)
    model.save_pretrained(tmp_path / "saved", max_shard_size=max_shard_size)
    assert inspect(tmp_path / "saved").format == "transformers"

    convert(tmp_path / "saved", tmp_path / "fused", spec=SPEC, to="fused")
    expected = model.state_dict()
    found = load_folder(tmp_path / "fused")
    assert set(found) == set(expected), seed
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype
        assert found[key].shape == tensor.shape
        assert as_bytes(found[key]) == as_bytes(tensor), (key, seed)
    assert inspect(tmp_path / "fused").format == "fused"
    assert verify(tmp_path / "saved", tmp_path / "fused").equal

    limit = 20_000 if max_shard_size == "20KB" else 10**9
    convert(
        tmp_path / "fused",
        tmp_path / "back",
        spec=SPEC,
        to="transformers",
        options=ConversionOptions(max_shard_bytes=limit),
    )
    names = sorted(path.name for path in (tmp_path / "saved").iterdir())
    assert sorted(path.name for path in (tmp_path / "back").iterdir()) == names
    for name in names:
        same = (tmp_path / "back" / name).read_bytes() == (tmp_path / "saved" / name).read_bytes()
        assert same, (name, seed)


def test_the_fused_files_are_those_that_transformers_writes_fused(tmp_path: Path) -> None:
    seed, model = make_model()
    model.save_pretrained(tmp_path / "saved")
    model.save_pretrained(tmp_path / "oracle", save_original_format=False)
    convert(tmp_path / "saved", tmp_path / "fused", spec=SPEC, to="fused")
    for path in sorted((tmp_path / "oracle").glob(WEIGHTS)):
        assert (tmp_path / "fused" / path.name).read_bytes() == path.read_bytes(), seed


@pytest.mark.parametrize("max_shard_bytes", [15_000, 10**9])
def test_transformers_loads_the_fused_directory_with_the_same_logits(
    tmp_path: Path, max_shard_bytes: int
) -> None:
    seed, model = make_model()
    model.save_pretrained(tmp_path / "saved")
    convert(
        tmp_path / "saved",
        tmp_path / "fused",
        spec=SPEC,
        to="fused",
        options=ConversionOptions(max_shard_bytes=max_shard_bytes),
    )
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "fused", output_loading_info=True
    )
    assert not info["missing_keys"], seed
    assert not info["unexpected_keys"], seed
    assert not info["mismatched_keys"], seed
    for key, tensor in model.state_dict().items():
        assert as_bytes(loaded.state_dict()[key]) == as_bytes(tensor), (key, seed)
    # Equal weights at other addresses: CPU kernels may round differently with the alignment.
    torch.testing.assert_close(logits(loaded.eval()), logits(model), rtol=1e-6, atol=1e-6)


def test_a_base_model_and_tied_embeddings_convert_too(tmp_path: Path) -> None:
    seed, model = make_model(tie_word_embeddings=True)
    for name, part in (("tied", model), ("base", model.model)):
        part.save_pretrained(tmp_path / name)
        convert(tmp_path / name, tmp_path / f"{name}.fused", spec=SPEC, to="fused")
        expected = part.state_dict()
        found = load_folder(tmp_path / f"{name}.fused")
        assert set(expected) - set(found) <= {"lm_head.weight"}, seed
        assert all(as_bytes(found[key]) == as_bytes(expected[key]) for key in found), (name, seed)
        convert(tmp_path / f"{name}.fused", tmp_path / f"{name}.back", spec=SPEC, to="transformers")
        for path in (tmp_path / name).glob(WEIGHTS):
            assert (tmp_path / f"{name}.back" / path.name).read_bytes() == path.read_bytes(), seed


def test_stored_views_are_the_keys_and_boxes_that_transformers_writes(tmp_path: Path) -> None:
    seed, model = make_model()
    model.save_pretrained(tmp_path)
    saved = load_folder(tmp_path)
    for name, tensor in model.state_dict().items():
        for view in SPEC.stored_views(name, tuple(tensor.shape)):
            box = tensor
            for dim, (offset, length) in enumerate(zip(view.offset, view.shape, strict=True)):
                box = box.narrow(dim, offset, length)
            stored = saved.pop(view.key)
            assert tuple(stored.shape) == view.stored_shape
            assert torch.equal(stored, box.reshape(view.stored_shape)), (view.key, seed)
    assert saved == {}


def test_headers_are_read_as_the_library_reads_them(tmp_path: Path) -> None:
    dtypes = [
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e8m0fnu,
        torch.int16,
        torch.uint16,
        torch.float16,
        torch.bfloat16,
        torch.int32,
        torch.uint32,
        torch.float32,
        torch.complex64,
        torch.float64,
        torch.int64,
        torch.uint64,
    ]
    shapes = [(), (0, 3), (3,), (2, 3)]
    tensors = {
        f"{dtype}.{shape} ключ": torch.zeros(shape, dtype=dtype)
        for dtype, shape in itertools.product(dtypes, shapes)
    }
    path = tmp_path / "x.safetensors"
    save_file(tensors, path, metadata={"format": "pt", "о": "да\n"})
    header = read_header(path)
    assert header.metadata == {"format": "pt", "о": "да\n"}
    with safe_open(path, "pt") as oracle:
        assert {entry.key for entry in header.tensors} == set(oracle.keys())
        for entry in header.tensors:
            part = oracle.get_slice(entry.key)
            assert (entry.dtype, list(entry.shape)) == (part.get_dtype(), part.get_shape())


def test_files_with_every_dtype_keep_the_order_of_the_library(tmp_path: Path) -> None:
    seed, model = make_model(num_hidden_layers=1)
    model.save_pretrained(tmp_path / "saved")
    path = tmp_path / "saved" / "model.safetensors"
    extra = {
        f"extra.{dtype}": torch.zeros(3, dtype=dtype)
        for dtype in (
            torch.bool,
            torch.uint8,
            torch.int8,
            torch.float8_e4m3fn,
            torch.float8_e5m2,
            torch.float8_e8m0fnu,
            torch.int16,
            torch.uint16,
            torch.float16,
            torch.bfloat16,
            torch.int32,
            torch.uint32,
            torch.complex64,
            torch.float64,
            torch.int64,
            torch.uint64,
        )
    }
    save_file(load_file(path) | extra, path, metadata={"format": "pt"})
    convert(tmp_path / "saved", tmp_path / "fused", spec=SPEC, to="fused")
    convert(tmp_path / "fused", tmp_path / "back", spec=SPEC, to="transformers")
    assert (tmp_path / "back" / path.name).read_bytes() == path.read_bytes(), seed
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["model_type"] == "qwen3_moe"
