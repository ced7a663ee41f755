"""Saves in the background, with real saver processes and real kills."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from unified_ckpt import (
    SaveArgumentError,
    SaveError,
    Shard,
    get_last_checkpoint,
    load,
    load_files,
    save,
    verify_checkpoint,
)
from unified_ckpt.async_saving import async_save
from unified_ckpt.options import SaveOptions
from unified_ckpt.saver import AsyncSaver
from unified_ckpt.saver_config import AsyncSaverConfig

ROWS, COLUMNS = 40, 1000
CONFIG = AsyncSaverConfig(timeout_s=20.0, start_timeout_s=60.0, orphan_grace_s=1.0)


def shards(rank: int, world_size: int, value: float) -> dict[str, list[Shard]]:
    tensor = torch.full((ROWS, COLUMNS), float(value))
    rows = Shard(
        key="rows",
        tensor=tensor,
        global_shape=(ROWS * world_size, COLUMNS),
        offset=(ROWS * rank, 0),
    )
    return {"model": [rows], "optimizer": [rows]}


def value_of(checkpoint: Path, part: str = "model") -> float:
    (index,) = {load_shape(checkpoint, part)}
    tensor = torch.full(index, -1.0)
    load(
        [Shard(key="rows", tensor=tensor, global_shape=index, offset=(0, 0))],
        checkpoint_id=checkpoint,
        part=part,
    )
    (value,) = set(tensor.flatten().tolist())
    return value


def load_shape(checkpoint: Path, part: str) -> tuple[int, ...]:
    from unified_ckpt import read_index

    return read_index(checkpoint, part)["rows"].shape


@pytest.fixture(scope="module")
def saver() -> Iterator[AsyncSaver]:
    with AsyncSaver(config=CONFIG) as saver:
        yield saver


def test_the_checkpoint_is_the_state_at_the_call(saver: AsyncSaver, tmp_path: Path) -> None:
    parts = shards(0, 1, 3.0)
    response = async_save(
        parts,
        checkpoint_id=tmp_path / "checkpoint-1",
        saver=saver,
        files={"config.json": b"{}"},
        rank_files={"rng-0": b"\x00\x01"},
    )
    assert response.staging_completion.done()
    parts["model"][0].tensor.fill_(-7.0)  # training goes on
    report = response.upload_completion.result(timeout=20)
    assert report is not None and report.path == (tmp_path / "checkpoint-1").resolve()
    assert value_of(report.path) == 3.0 and value_of(report.path, "optimizer") == 3.0
    assert load_files(report.path, "config.json") == b"{}"
    assert load_files(report.path, "rng-0") == b"\x00\x01"
    assert verify_checkpoint(report.path).problems == ()


def test_every_dtype_and_ugly_shape_is_staged_bit_for_bit(
    saver: AsyncSaver, tmp_path: Path
) -> None:
    raw = torch.randint(0, 2, (6, 16), dtype=torch.uint8)
    tensors = {
        "bool": raw.view(torch.bool),
        "bf16": raw.view(torch.bfloat16),
        "f8": raw.view(torch.float8_e4m3fn),
        "f4": raw.view(torch.float4_e2m1fn_x2),
        "c64": raw.view(torch.complex64),
        "i64": torch.tensor(-5),
        "empty": torch.empty(0, 3),
        "strided": torch.rand(4, 6).t()[1:, ::2],
        "leaf": torch.rand(3, requires_grad=True),
    }
    parts = {
        "model": [
            Shard(key=k, tensor=t, global_shape=tuple(t.shape), offset=(0,) * t.dim())
            for k, t in tensors.items()
        ],
        "optimizer": [],
    }
    async_save(parts, checkpoint_id=tmp_path / "c", saver=saver).upload_completion.result(
        timeout=20
    )
    for shard in parts["model"]:
        found = torch.empty(tuple(shard.tensor.shape), dtype=shard.tensor.dtype)
        load(
            [
                Shard(
                    key=shard.key,
                    tensor=found,
                    global_shape=shard.global_shape,
                    offset=shard.offset,
                )
            ],
            checkpoint_id=tmp_path / "c",
        )
        want = shard.tensor.detach().contiguous().reshape(-1)
        assert torch.equal(found.reshape(-1).view(torch.uint8), want.view(torch.uint8)), shard.key


def test_modules_optimizers_values_and_options_are_taken_as_save_takes_them(
    saver: AsyncSaver, tmp_path: Path
) -> None:
    def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Linear(40, 30)
        optimizer = torch.optim.Adam(dict(model.named_parameters()).items(), lr=0.1)
        model(torch.rand(2, 40)).sum().backward()
        optimizer.step()
        return model, optimizer

    model, optimizer = trained()
    state = {"model": model, "optimizer": optimizer, "progress": {"epoch": 3}}
    options = SaveOptions(moment_compression="int8")
    twin = {"exact": tmp_path / "exact", "packed": tmp_path / "packed"}
    save(state, checkpoint_id=twin["exact"])
    save(state, checkpoint_id=twin["packed"], options=options)
    for name, used in (("exact", None), ("packed", options)):
        place = tmp_path / f"async-{name}"
        response = async_save(state, checkpoint_id=place, saver=saver, options=used)
        assert response.upload_completion.result(timeout=60) is not None
        for path in twin[name].iterdir():
            assert (place / path.name).read_bytes() == path.read_bytes(), path
    other, other_optimizer = trained()
    found = {"model": other, "optimizer": other_optimizer, "progress": {"epoch": 0}}
    load(found, checkpoint_id=tmp_path / "async-exact")
    assert torch.equal(other.weight, model.weight) and found["progress"] == {"epoch": 3}


def test_a_growing_state_gets_larger_staging(saver: AsyncSaver, tmp_path: Path) -> None:
    for number, rows in enumerate((10, 5000, 20)):
        tensor = torch.full((rows, 1000), float(number))
        parts = {
            "model": [Shard(key="rows", tensor=tensor, global_shape=(rows, 1000), offset=(0, 0))]
        }
        response = async_save(parts, checkpoint_id=tmp_path / f"checkpoint-{number}", saver=saver)
        response.upload_completion.result(timeout=20)
        assert value_of(tmp_path / f"checkpoint-{number}") == number


def test_an_error_of_the_background_shows_in_the_future_and_not_again(
    saver: AsyncSaver, tmp_path: Path
) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes.txt").write_text("not a checkpoint")
    response = async_save(shards(0, 1, 1.0), checkpoint_id=tmp_path / "taken", saver=saver)
    with pytest.raises(SaveArgumentError, match=r"not a checkpoint that may be replaced"):
        response.upload_completion.result(timeout=20)
    response = async_save(shards(0, 1, 2.0), checkpoint_id=tmp_path / "checkpoint-2", saver=saver)
    assert response.upload_completion.result(timeout=20) is not None


def test_an_error_that_nobody_saw_is_raised_by_the_next_save(
    saver: AsyncSaver, tmp_path: Path
) -> None:
    (tmp_path / "taken").write_text("a file")
    response = async_save(shards(0, 1, 1.0), checkpoint_id=tmp_path / "taken", saver=saver)
    while not response.upload_completion.done():
        time.sleep(0.01)
    with pytest.raises(SaveError, match=r"since the last call .* is not a directory"):
        async_save(shards(0, 1, 1.0), checkpoint_id=tmp_path / "checkpoint-1", saver=saver)
    response = async_save(shards(0, 1, 2.0), checkpoint_id=tmp_path / "checkpoint-2", saver=saver)
    assert response.upload_completion.result(timeout=20) is not None
    assert get_last_checkpoint(tmp_path) == tmp_path / "checkpoint-2"


def test_wrong_arguments_name_the_part(saver: AsyncSaver, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"part 'model' holds a Tensor"):
        async_save({"model": [torch.zeros(1)]}, checkpoint_id=tmp_path / "c", saver=saver)
    with pytest.raises(TypeError, match=r"file 'a' holds a str"):
        async_save({}, checkpoint_id=tmp_path / "c", saver=saver, files={"a": "text"})
    with pytest.raises(ValueError, match=r"timeout_s=0 must be a positive number"):
        AsyncSaverConfig(timeout_s=0)
