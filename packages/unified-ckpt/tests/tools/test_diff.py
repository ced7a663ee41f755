import random
from pathlib import Path

import pytest
import torch

from unified_ckpt import Shard, read_index, save
from unified_ckpt.errors import CorruptCheckpointError, LoadError
from unified_ckpt.options import SaveOptions
from unified_ckpt.tools.diff import diff_checkpoints


def whole(key: str, tensor: torch.Tensor) -> Shard:
    return Shard.of(key, tensor, global_shape=tuple(tensor.shape), offset=(0,) * tensor.dim())


def put(folder: Path, max_shard_bytes: int = 10**9, **tensors: torch.Tensor) -> Path:
    shards = [whole(key, tensor) for key, tensor in tensors.items()]
    options = SaveOptions(max_shard_bytes=max_shard_bytes)
    return save({"model": shards}, checkpoint_id=folder, options=options).path


def said(a: Path, b: Path) -> list[str]:
    return [str(difference) for difference in diff_checkpoints(a, b)]


def test_how_tensors_are_divided_into_files_is_no_difference(tmp_path: Path) -> None:
    tensors = {f"w{i}": torch.randn(7, 5) for i in range(5)} | {
        "s": torch.tensor(1),
        "e": torch.ones(0, 2),
    }
    assert said(put(tmp_path / "a", **tensors), put(tmp_path / "b", 200, **tensors)) == []


def test_keys_dtypes_shapes_and_values_that_differ_are_named(tmp_path: Path) -> None:
    w = torch.zeros(4, 6)
    changed = w.clone()
    changed[2, 3], changed[3, 5] = 1.0, -0.0  # -0.0 equals 0.0, but its bits do not
    a = put(tmp_path / "a", w=w, dtype=w, shape=w, only_a=w, nan=torch.full((2,), torch.nan))
    b = put(
        tmp_path / "b", w=changed, dtype=w.bfloat16(), shape=w.T, only_b=w,
        nan=torch.full((2,), torch.nan),
    )  # fmt: skip
    assert said(a, b) == [
        "model 'dtype': F32 [4, 6] against BF16 [4, 6]",
        "model 'only_a': only in the first checkpoint",
        "model 'only_b': only in the second checkpoint",
        "model 'shape': F32 [4, 6] against F32 [6, 4]",
        "model 'w': 2 of 24 elements differ, the first at [2, 3]",
    ]


def test_any_changed_element_is_found_at_its_place(tmp_path: Path, monkeypatch) -> None:
    from unified_ckpt.tools import diff

    seed = random.randrange(2**32)
    rng = random.Random(seed)
    monkeypatch.setattr(diff, "DEFAULT_CHUNK_BYTES", 64)
    w = torch.randn(3, 7, 5)
    a = put(tmp_path / "a", w=w)
    for _ in range(10):
        place = tuple(rng.randrange(n) for n in w.shape)
        other = w.clone()
        other[place] += 1
        b = put(tmp_path / "b", w=other)
        assert said(a, b) == [f"model 'w': 1 of 105 elements differ, the first at {list(place)}"], (
            seed
        )


def test_damage_is_no_difference_but_an_error(tmp_path: Path) -> None:
    a, b = put(tmp_path / "a", w=torch.ones(9)), put(tmp_path / "b", w=torch.ones(9))
    raw = bytearray((b / "model.safetensors").read_bytes())
    raw[read_index(b)["w"].begin + 4] ^= 1
    (b / "model.safetensors").write_bytes(raw)
    with pytest.raises(CorruptCheckpointError, match="'w' is damaged"):
        said(a, b)
    with pytest.raises(LoadError, match="no such checkpoint directory"):
        said(a, tmp_path / "nothing")
