"""A fast tier on tmpfs before the disk."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from unified_ckpt import Shard, get_last_checkpoint, load, save, verify_checkpoint
from unified_ckpt.errors import CorruptCheckpointError, LoadError
from unified_ckpt.folders.tiers import copy_checkpoint, flush_tier, last_checkpoint_of_tiers


@pytest.fixture
def fast() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="unified-ckpt-tier-", dir="/dev/shm") as folder:
        yield Path(folder)


def state(value: float) -> dict[str, list[Shard]]:
    tensor = torch.full((100, 7), float(value))
    return {"model": [Shard.of("w", tensor, global_shape=(100, 7), offset=(0, 0))]}


def value_of(checkpoint: Path | None) -> float:
    assert checkpoint is not None
    want = state(-1.0)
    load(want, checkpoint_id=checkpoint)
    (value,) = set(want["model"][0].tensor.flatten().tolist())
    return value


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_valid_checkpoint_of_both_tiers_is_found(fast: Path, tmp_path: Path) -> None:
    assert last_checkpoint_of_tiers(fast, tmp_path / "none") is None
    save(state(1), checkpoint_id=tmp_path / "checkpoint-1")
    assert last_checkpoint_of_tiers(fast, tmp_path) == tmp_path / "checkpoint-1"
    save(state(2), checkpoint_id=fast / "checkpoint-2")
    assert last_checkpoint_of_tiers(fast, tmp_path) == fast / "checkpoint-2"
    save(state(2), checkpoint_id=tmp_path / "checkpoint-2")
    assert last_checkpoint_of_tiers(fast, tmp_path) == fast / "checkpoint-2"
    (fast / "checkpoint-2" / "manifest.json").unlink()
    with pytest.warns(UserWarning, match="checkpoint-2 is passed over"):
        assert last_checkpoint_of_tiers(fast, tmp_path) == tmp_path / "checkpoint-2"


def test_flushing_copies_only_what_the_disk_lacks(fast: Path, tmp_path: Path) -> None:
    assert flush_tier(fast, tmp_path) is None
    save(state(5), checkpoint_id=fast / "checkpoint-5", files={"nested/config.json": b"{}"})
    save(state(4), checkpoint_id=tmp_path / "checkpoint-4")
    copy = flush_tier(fast, tmp_path)
    assert copy == tmp_path / "checkpoint-5" == get_last_checkpoint(tmp_path)
    assert value_of(copy) == 5.0 and verify_checkpoint(copy).problems == ()
    assert flush_tier(fast, tmp_path) is None
    assert names(tmp_path) == ["checkpoint-4", "checkpoint-5"]


def test_a_damaged_source_is_never_published(fast: Path, tmp_path: Path) -> None:
    save(state(1), checkpoint_id=fast / "checkpoint-1")
    file = fast / "checkpoint-1" / "model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    with pytest.raises(CorruptCheckpointError, match=r"the copy of .* is damaged"):
        copy_checkpoint(fast / "checkpoint-1", tmp_path / "checkpoint-1")
    (tmp_path / "plain").mkdir()
    with pytest.raises(LoadError, match="no complete checkpoint"):
        copy_checkpoint(tmp_path / "plain", tmp_path / "checkpoint-1")
    assert names(tmp_path) == ["plain"]
