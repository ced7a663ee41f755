import random
from pathlib import Path

import pytest
import torch

from ranktest import run_ranks
from unified_ckpt import Shard, load, read_index, save
from unified_ckpt.errors import CorruptCheckpointError
from unified_ckpt.files.checksums import checksums
from unified_ckpt.loading import reader as reader_module


def box(key: str, tensor: torch.Tensor, global_shape: tuple, offset: tuple) -> Shard:
    return Shard.of(key, tensor, global_shape=global_shape, offset=offset)


def flip(checkpoint: Path, offset: int, key: str = "w") -> None:
    stored = read_index(checkpoint)[key]
    raw = bytearray((checkpoint / stored.file).read_bytes())
    raw[stored.begin + offset] ^= 1
    (checkpoint / stored.file).write_bytes(raw)


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Checksums of 1 KiB, so that small tensors have many."""
    monkeypatch.setattr(checksums, "CHUNK_BYTES", 1024)
    from unified_ckpt.saving.commit import writer

    monkeypatch.setattr(writer, "CHUNK_BYTES", 1024)
    w = torch.arange(64 * 64, dtype=torch.float32).view(64, 64)
    return save({"model": [box("w", w, (64, 64), (0, 0))]}, checkpoint_id=tmp_path / "c").path


def test_a_slice_checks_the_chunks_that_it_covers_and_reads_no_more(checkpoint: Path) -> None:
    rows = torch.zeros(10, 64)  # bytes 1536 to 4096: the chunks from 2048 are whole
    report = load([box("w", rows, (64, 64), (6, 0))], checkpoint_id=checkpoint)
    assert (report.num_bytes, report.verified_bytes) == (2560, 2048)
    flip(checkpoint, 2048)
    with pytest.raises(CorruptCheckpointError, match="'w' is damaged: bytes"):
        load([box("w", rows, (64, 64), (6, 0))], checkpoint_id=checkpoint)
    flip(checkpoint, 2048)
    flip(checkpoint, 5000)  # not touched
    load([box("w", rows, (64, 64), (6, 0))], checkpoint_id=checkpoint, verify="touched")


@pytest.mark.parametrize("offset", [0, 1535, 1536, 2047, 4095])
def test_touched_chunks_are_checked_whole_when_that_is_wanted(
    offset: int, checkpoint: Path
) -> None:
    rows = torch.zeros(9, 64)  # bytes 1536 to 3840
    want = [box("w", rows, (64, 64), (6, 0))]
    report = load(want, checkpoint_id=checkpoint, verify="touched")
    assert report.verified_bytes == 3 * 1024 and report.num_bytes == 2304 + 2 * 1024
    flip(checkpoint, offset)
    if offset < 1024:
        load(want, checkpoint_id=checkpoint, verify="touched")
        return
    with pytest.raises(CorruptCheckpointError, match="'w' is damaged"):
        load(want, checkpoint_id=checkpoint, verify="touched")


def test_columns_check_every_chunk_that_a_run_meets(checkpoint: Path) -> None:
    columns = torch.zeros(64, 2)
    want = [box("w", columns, (64, 64), (0, 30))]
    report = load(want, checkpoint_id=checkpoint)
    assert (report.num_bytes, report.verified_bytes) == (64 * 2 * 4, 0)
    report = load(want, checkpoint_id=checkpoint, verify="touched")
    assert report.verified_bytes == 64 * 64 * 4
    flip(checkpoint, 7777)
    with pytest.raises(CorruptCheckpointError, match="'w' is damaged"):
        load(want, checkpoint_id=checkpoint, verify="touched")


def test_boxes_that_two_ranks_wrote_are_checked_in_a_load_of_the_whole(tmp_path: Path) -> None:
    def fn(rank: int, world_size: int) -> None:
        half = torch.full((40, 300), float(rank))
        save({"model": [box("w", half, (40, 600), (0, 300 * rank))]}, checkpoint_id=tmp_path / "c")

    run_ranks(fn, 2)
    whole = torch.zeros(40, 600)
    report = load([box("w", whole, (40, 600), (0, 0))], checkpoint_id=tmp_path / "c")
    assert report.verified_bytes == report.num_bytes == 40 * 600 * 4
    assert whole[:, :300].unique().tolist() == [0.0] and whole[:, 300:].unique().tolist() == [1.0]
    seed = random.randrange(2**32)
    flip(tmp_path / "c", random.Random(seed).randrange(40 * 600 * 4))
    with pytest.raises(CorruptCheckpointError, match="'w' is damaged"):
        load([box("w", whole, (40, 600), (0, 0))], checkpoint_id=tmp_path / "c")
        raise AssertionError(seed)


def test_many_tiny_runs_are_read_over_their_gaps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = torch.randn(500, 8)
    checkpoint = save({"model": [box("w", w, (500, 8), (0, 0))]}, checkpoint_id=tmp_path / "c").path
    column = torch.zeros(500, 1)
    want = [box("w", column, (500, 8), (0, 3))]
    assert load(want, checkpoint_id=checkpoint).num_bytes == 500 * 4
    assert torch.equal(column, w[:, 3:4])
    monkeypatch.setattr(reader_module, "_MANY_RUNS", 100)
    column.zero_()
    assert load(want, checkpoint_id=checkpoint).num_bytes == 499 * 32 + 4
    assert torch.equal(column, w[:, 3:4])
