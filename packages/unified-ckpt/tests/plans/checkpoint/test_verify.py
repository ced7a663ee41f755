import os
import random
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

from ranktest import run_ranks
from unified_ckpt import Shard, read_index, save, verify_checkpoint
from unified_ckpt.errors import LoadError


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with files of one writer, a file of two writers, an index and other files."""
    folder = tmp_path_factory.mktemp("pristine") / "c"

    def fn(rank: int, world_size: int) -> None:
        half = Shard.of("split", torch.rand(9, 4), global_shape=(9, 8), offset=(0, 4 * rank))
        own = Shard.of(f"own{rank}", torch.rand(50), global_shape=(50,), offset=(0,))
        save(
            {"model": [half, own], "optimizer": [own]},
            checkpoint_id=folder,
            files={"config.json": b'{"a": 1}'},
        )

    run_ranks(fn, 2)
    return folder


@pytest.fixture
def checkpoint(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "c"))


def test_an_intact_checkpoint_has_no_problems_and_every_byte_is_read(checkpoint: Path) -> None:
    report = verify_checkpoint(checkpoint)
    sizes = [p.stat().st_size for p in checkpoint.iterdir() if p.name != "manifest.json"]
    assert report.problems == () and report.checksummed
    assert (report.num_files, report.num_bytes) == (len(sizes), sum(sizes))


def test_every_flipped_bit_is_found_in_its_file(checkpoint: Path) -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    files = sorted(checkpoint.iterdir())
    for _ in range(150):
        path = rng.choice(files)
        good = path.read_bytes()
        bad = bytearray(good)
        position = rng.randrange(len(bad))
        bad[position] ^= 1 << rng.randrange(8)
        path.write_bytes(bad)
        problems = verify_checkpoint(checkpoint).problems
        assert {p.file for p in problems} == {path.name}, (seed, path.name, position)
        path.write_bytes(good)
    assert verify_checkpoint(checkpoint).problems == ()


def test_the_damaged_tensor_is_named_also_where_two_ranks_wrote(checkpoint: Path) -> None:
    for key, stored in read_index(checkpoint).items():
        path = checkpoint / stored.file
        raw = bytearray(path.read_bytes())
        raw[stored.begin + 5] ^= 1
        path.write_bytes(raw)
        (problem,) = verify_checkpoint(checkpoint).problems
        assert (problem.file, problem.key) == (stored.file, key)
        assert str(problem).startswith(f"{stored.file}: {key!r}: bytes ")
        raw[stored.begin + 5] ^= 1
        path.write_bytes(raw)


def test_missing_and_cut_files_are_named(checkpoint: Path) -> None:
    (checkpoint / "config.json").unlink()
    os.truncate(checkpoint / "optimizer.safetensors.index.json", 10)
    said = [str(p) for p in verify_checkpoint(checkpoint).problems]
    assert any(s == "config.json: file is missing" for s in said)
    assert any(s.startswith("optimizer.safetensors.index.json: has 10 bytes") for s in said)


def test_a_plain_directory_is_checked_for_structure_only(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="neither a manifest nor a safetensors file"):
        verify_checkpoint(tmp_path)
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"w": torch.ones(9)}, path)
    report = verify_checkpoint(tmp_path)
    assert (report.problems, report.checksummed) == ((), False)
    os.truncate(path, path.stat().st_size - 1)
    (problem,) = verify_checkpoint(tmp_path).problems
    assert problem.file == "model.safetensors"
    safetensors.torch.save_file({"w": torch.ones(9)}, path)
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"x": "model.safetensors"}}'
    )
    (problem,) = verify_checkpoint(tmp_path).problems
    assert "says that it holds 'x'" in problem.message
