from pathlib import Path

import pytest
import torch

from moe_train.checkpoint import has_part
from unified_ckpt import CheckpointError, Shard, save


def test_a_damaged_part_is_an_error_and_a_missing_one_is_not(tmp_path: Path) -> None:
    shard = Shard(key="w", tensor=torch.ones(4), global_shape=(4,), offset=(0,))
    target = tmp_path / "checkpoint-1"
    save({"model": [shard], "master_weights": [shard]}, checkpoint_id=target)
    assert has_part(target, "master_weights")
    assert not has_part(target, "optimizer")
    (weights,) = target.glob("master_weights*.safetensors")
    weights.write_bytes(b"\xff" * weights.stat().st_size)
    with pytest.raises(CheckpointError, match="master_weights"):
        has_part(target, "master_weights")
