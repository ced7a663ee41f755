"""Independent reader, writer and model maker: none of them uses the package."""

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

# What computes needs torch, without which the package alone is tested; nox -s seams runs these.
NEED_TORCH = ("adapters", "compute", "opinions/test_numbers.py", "merging", "quantization")
collect_ignore = [] if find_spec("torch") else list(NEED_TORCH)


def pytest_report_header() -> str:
    return f"without torch, so not collected: {', '.join(collect_ignore)}" if collect_ignore else ""


# (dtype, shape, bytes) by key
Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]


def write_file(path: Path, tensors: Tensors, metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors in the given order, as the format's description says."""
    fields: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    begin = 0
    for key, (dtype, shape, data) in tensors.items():
        fields[key] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [begin, begin + len(data)],
        }
        begin += len(data)
    text = json.dumps(fields).encode()
    path.write_bytes(
        struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values())
    )


def read_file(path: Path) -> Tensors:
    """Read a file by the format's description."""
    content = path.read_bytes()
    (size,) = struct.unpack_from("<Q", content)
    fields = json.loads(content[8 : 8 + size])
    fields.pop("__metadata__", None)
    return {
        key: (
            field["dtype"],
            tuple(field["shape"]),
            content[8 + size + field["data_offsets"][0] : 8 + size + field["data_offsets"][1]],
        )
        for key, field in fields.items()
    }


def read_folder(folder: Path) -> Tensors:
    """Read every model file of a folder, whatever the index says."""
    tensors: Tensors = {}
    for path in sorted(folder.glob("model*.safetensors")):
        for key, value in read_file(path).items():
            assert key not in tensors, f"{key} twice"
            tensors[key] = value
    return tensors


def write_folder(folder: Path, shards: list[Tensors], config: Mapping[str, object]) -> None:
    """Write a model directory: one file without an index, or several with one."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text('{"kind": "测试"}', encoding="utf-8")
    metadata = {"format": "pt"}
    if len(shards) == 1:
        write_file(folder / "model.safetensors", shards[0], metadata)
        return
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_file(folder / name, shard, metadata)
        weight_map |= dict.fromkeys(shard, name)
    total = sum(len(data) for shard in shards for _, _, data in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@dataclass(frozen=True)
class Model:
    """A random model in both forms, made with numpy; `seed` replays it."""

    seed: int
    config: dict[str, object]
    per_expert: Tensors
    fused: Tensors

    def write(self, folder: Path, form: str, *, num_files: int = 1) -> Path:
        """Write one form with its tensors dealt over files at random."""
        tensors = self.per_expert if form == "transformers" else self.fused
        keys = list(tensors)
        order = np.random.default_rng(self.seed + 1).permutation(len(keys))
        shuffled = [keys[i] for i in order]
        shards = [{key: tensors[key] for key in shuffled[i::num_files]} for i in range(num_files)]
        write_folder(folder, shards, self.config)
        return folder


def make_model(
    *, num_layers: int = 2, num_experts: int = 12, h: int = 6, d: int = 10, dtype: str = "BF16"
) -> Model:
    """Make a model with distinct dims; layer 0 is dense, as `mlp_only_layers` allows."""
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    rng = np.random.default_rng(seed)
    word = {"BF16": np.uint16, "F8_E4M3": np.uint8, "F32": np.uint32}[dtype]

    def bits(*shape: int) -> np.ndarray:
        # every bit pattern: NaN with payload, -0.0, subnormals
        return rng.integers(0, np.iinfo(word).max, shape, dtype=word, endpoint=True)

    def stored(*shape: int) -> tuple[str, tuple[int, ...], bytes]:
        return dtype, shape, bits(*shape).tobytes()

    shared: Tensors = {
        "model.embed_tokens.weight": stored(7, d),
        "lm_head.weight": stored(7, d),
        "model.norm.weight": stored(d),
        "model.layers.0.mlp.gate_proj.weight": stored(2 * h, d),
        "model.layers.0.mlp.up_proj.weight": stored(2 * h, d),
        "model.layers.0.mlp.down_proj.weight": stored(d, 2 * h),
        "model.mtp.unheard_of": ("I64", (3,), rng.bytes(24)),
        "model.layers.1.self_attn.step": ("F32", (), rng.bytes(4)),
        "model.layers.1.self_attn.empty": (dtype, (0, 5), b""),
    }
    per_expert, fused = dict(shared), dict(shared)
    for layer in range(1, num_layers):
        mlp = f"model.layers.{layer}.mlp"
        router = stored(num_experts, d)
        per_expert[f"{mlp}.gate.weight"] = fused[f"{mlp}.gate.weight"] = router
        gate, up, down = (
            bits(num_experts, h, d),
            bits(num_experts, h, d),
            bits(num_experts, d, h),
        )
        for e in range(num_experts):
            for name, values in (("gate", gate), ("up", up), ("down", down)):
                key = f"{mlp}.experts.{e}.{name}_proj.weight"
                per_expert[key] = (dtype, values[e].shape, values[e].tobytes())
        both = np.concatenate([gate, up], axis=1)
        fused[f"{mlp}.experts.gate_up_proj"] = (dtype, both.shape, both.tobytes())
        fused[f"{mlp}.experts.down_proj"] = (dtype, down.shape, down.tobytes())
    config: dict[str, object] = {"model_type": "qwen3_moe", "num_experts": num_experts}
    return Model(seed=seed, config=config, per_expert=per_expert, fused=fused)


@dataclass(frozen=True)
class Oracle:
    """The functions above, as one fixture."""

    make_model: Callable[..., Model] = make_model
    write_file: Callable[..., None] = write_file
    write_folder: Callable[..., None] = write_folder
    read_file: Callable[[Path], Tensors] = read_file
    read_folder: Callable[[Path], Tensors] = read_folder


@pytest.fixture
def oracle() -> Oracle:
    """Give tests the independent reader, writer and model maker."""
    return Oracle()


@pytest.fixture
def model() -> Model:
    """Give a small random model."""
    return make_model()
