from math import prod
from pathlib import Path
from typing import Any

import pytest

from weight_convert.cli import main
from weight_convert.cutting import SplitLayout
from weight_convert.errors import WeightConvertError
from weight_convert.files import read_catalog
from weight_convert.splitting import split
from weight_convert.verification import rank_bytes, tensor_tree


def test_ranks_hold_the_bytes_that_split_writes(oracle: Any, model: Any, tmp_path: Path) -> None:
    src = model.write(tmp_path / "src", "transformers")
    layout = SplitLayout(tp=3, ep=5, etp=2, pp=2)
    split(src, tmp_path / "split", layout)
    written = tuple(
        sum(
            len(data)
            for _, _, data in oracle.read_folder(tmp_path / "split" / f"rank-{rank:05d}").values()
        )
        for rank in range(layout.world_size)
    )
    assert rank_bytes(read_catalog(src), layout) == written


def test_other_dtypes_count_their_real_bytes(oracle: Any, tmp_path: Path) -> None:
    tensors = {
        "model.layers.0.mlp.down_proj.weight": ("BF16", (130, 300), bytes(2 * 130 * 300)),
        "model.norm.weight": ("BF16", (130,), bytes(260)),
    }
    config = {"model_type": "qwen3_moe", "num_experts": 0, "num_hidden_layers": 1}
    experts = {
        "model.layers.1.mlp.experts.gate_up_proj": ("BF16", (1, 2, 4), bytes(16)),
        "model.layers.1.mlp.experts.down_proj": ("BF16", (1, 4, 1), bytes(8)),
    }
    oracle.write_folder(tmp_path / "m", [tensors | experts], config)
    catalog = read_catalog(tmp_path / "m")
    whole = SplitLayout()
    assert rank_bytes(catalog, whole) == (78000 + 260 + 24,)
    assert rank_bytes(catalog, whole, dtype="float32") == (156000 + 520 + 48,)
    blocks = 2 * 3  # of 128 x 128, the last ones cut off
    assert rank_bytes(catalog, whole, dtype="fp8") == (39000 + 4 * blocks + 260 + 8 + 4 + 4 + 4,)
    with pytest.raises(WeightConvertError, match="expected one of fp8, bfloat16"):
        rank_bytes(catalog, whole, dtype="fp7")


def test_matrices_of_every_role_that_quantize_takes_count_as_fp8(
    oracle: Any, tmp_path: Path
) -> None:
    layer = "model.layers.1."
    shapes = {
        "self_attn.q_a_proj.weight": (200, 10),  # in fp8: 2000 codes and 2 scales
        "eh_proj.weight": (10, 20),
        "mlp.gate.weight": (2, 10),
        "mlp.experts.gate_up_proj": (2, 8, 10),  # 160 and 2
        "mlp.experts.down_proj": (2, 10, 4),  # 80 and 2
    }
    tensors = {
        layer + name: ("BF16", shape, bytes(2 * prod(shape))) for name, shape in shapes.items()
    }
    config = {"model_type": "deepseek_v3", "n_routed_experts": 2, "num_hidden_layers": 2}
    oracle.write_folder(tmp_path / "m", [tensors], config)
    held = rank_bytes(read_catalog(tmp_path / "m"), SplitLayout(), dtype="fp8")
    assert held == (2008 + 400 + 40 + 168 + 88,)


def test_the_tree_takes_numbers_together(
    oracle: Any, model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    src = model.write(tmp_path / "m", "transformers")
    tree = {branch.name: branch for branch in tensor_tree(read_catalog(src))}
    gate = tree["model.layers.*.mlp.experts.*.gate_proj.weight"]
    assert (gate.count, gate.dtype, gate.shape, gate.size_bytes) == (12, "BF16", (6, 10), 1440)
    assert sum(branch.count for branch in tree.values()) == len(model.per_expert)
    assert main(["inspect", str(src), "--tree", "--ep", "2", "--dtype", "fp8"]) == 0
    shown = capsys.readouterr().out
    assert "model.layers.*.mlp.experts.*.gate_proj.weight" in shown
    assert "bytes on ranks 0 to 1, each" in shown
