from pathlib import Path

import pytest
import torch

from moe_train.checkpoint.training_state import find_checkpoint, has_part, newest_checkpoint
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


def test_a_damaged_newer_checkpoint_is_one_line_of_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shard = Shard(key="w", tensor=torch.ones(4), global_shape=(4,), offset=(0,))
    for step in (1, 2, 3):
        save({"model": [shard]}, checkpoint_id=tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-3" / "model.safetensors").write_bytes(b"torn")
    assert newest_checkpoint(tmp_path) == find_checkpoint(tmp_path, "latest")
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint-2"
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3 and len(set(lines)) == 1
    assert lines[0].startswith(f"warning: {tmp_path / 'checkpoint-3'} is passed over")
    assert "model.safetensors: 4 bytes, expected" in lines[0] and "\n" not in lines[0]
