"""A checkpoint of so many pieces that its manifest is read in parts, end to end."""

import random
import shutil
from pathlib import Path

import pytest
import safetensors
import torch

from unified_ckpt import (
    Box,
    LoadOptions,
    SaveOptions,
    Shard,
    diff_checkpoints,
    export_model,
    load,
    read_index,
    save,
    verify_checkpoint,
)
from unified_ckpt.errors import CheckpointError, CorruptCheckpointError
from unified_ckpt.files.format.tables import TABLES_NAME
from unified_ckpt.plans.checkpoint import Checkpoint

NUM_TENSORS = 3000


def state_of(offset: float = 0.0) -> dict[str, dict[str, torch.Tensor]]:
    tensors = {
        f"layer.{i:04d}.w": torch.arange(2.0 + i % 2) + i + offset for i in range(NUM_TENSORS)
    }
    return {"model": tensors, "optimizer": {f"{key}/moment1": t * 2 for key, t in tensors.items()}}


def check(place: str | Path) -> None:
    again = state_of(offset=1000.0)
    report = load(again, checkpoint_id=place)
    assert report.verified_bytes == report.num_bytes
    for part, tensors in state_of().items():
        assert all(torch.equal(again[part][key], tensor) for key, tensor in tensors.items())
    last = torch.zeros(1)
    box = Box((3,), (2,), (1,))
    load([Shard(key="layer.0003.w", tensor=last, box=box)], checkpoint_id=place)
    assert last.tolist() == [5.0]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("large") / "checkpoint-1"
    save(state_of(), checkpoint_id=place, files={"config.json": b"{}"})
    assert (place / TABLES_NAME).is_file() and b'"version":4' in (
        place / "manifest.json"
    ).read_bytes()
    return place


def test_a_large_checkpoint_is_loaded_verified_and_opened_by_the_library(large: Path) -> None:
    check(large)
    report = verify_checkpoint(large)
    assert report.problems == ()
    assert report.num_bytes == sum(
        path.stat().st_size for path in large.iterdir() if path.name != "manifest.json"
    )
    with safetensors.safe_open(large / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(state_of()["model"]) == set(read_index(large))


def test_a_large_checkpoint_is_overwritten_compared_and_exported(
    large: Path, tmp_path: Path
) -> None:
    place = tmp_path / "checkpoint-1"
    save(state_of(offset=3.0), checkpoint_id=place)
    save(state_of(), checkpoint_id=place, files={"config.json": b"{}"})
    check(place)
    assert [*diff_checkpoints(place, large)] == []
    export_model(large, tmp_path / "exported")
    exported = {path.name for path in (tmp_path / "exported").iterdir()}
    assert exported == {"config.json", "manifest.json", "manifest.bin", "model.safetensors"}
    save({"model": {"w": torch.zeros(2)}}, checkpoint_id=place)  # a small one has no tables
    assert not (place / TABLES_NAME).exists()


def test_a_large_checkpoint_in_a_store_and_in_boxes(tmp_path: Path) -> None:
    place = f"file://{tmp_path}/run/checkpoint-1"
    save(state_of(), checkpoint_id=place)
    check(place)
    save(state_of(), checkpoint_id=place, options=SaveOptions(ignore_merge_optimizer=True))
    check(place)
    assert verify_checkpoint(place).problems == ()
    assert len([*(tmp_path / "run").rglob(TABLES_NAME)]) == 1


def test_damage_of_the_tables_is_found_by_who_reads_them_and_by_verify(
    large: Path, tmp_path: Path
) -> None:
    place = tmp_path / "c"
    shutil.copytree(large, place)
    path = place / TABLES_NAME
    good = path.read_bytes()
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    for at in rng.sample(range(len(good)), 8):
        path.write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
        problems = verify_checkpoint(place).problems
        assert TABLES_NAME in {problem.file for problem in problems}, (seed, at)
        with pytest.raises(CorruptCheckpointError, match=TABLES_NAME):
            load(state_of(), checkpoint_id=place, options=LoadOptions())
    path.unlink()
    with pytest.raises(CheckpointError, match=TABLES_NAME):
        load(state_of(), checkpoint_id=place)
    assert any(problem.file == TABLES_NAME for problem in verify_checkpoint(place).problems)


def test_opening_reads_no_table_and_a_tensor_those_it_needs(large: Path) -> None:
    path = large / TABLES_NAME
    good = path.read_bytes()
    path.unlink()
    try:
        with Checkpoint(large) as checkpoint:
            assert checkpoint.parts() == ["model", "optimizer"]
            path.write_bytes(good)
            assert set(checkpoint.tensors("model", ["layer.0000.w", "none"])) == {"layer.0000.w"}
    finally:
        path.write_bytes(good)
