import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch

from unified_ckpt import load, load_files, read_index, save, verify_checkpoint
from unified_ckpt.errors import (
    CheckpointValueError,
    CorruptCheckpointError,
    ReplacedCheckpointError,
)
from unified_ckpt.files.format import MANIFEST_NAME
from unified_ckpt.plans.checkpoint.directory import Checkpoint, read_checkpoint
from unified_ckpt.saving.commit.commit import hidden_name


def write(folder: Path, value: float) -> Path:
    state = {"model": {"w": torch.full((4,), float(value))}, "step": int(value)}
    save(state, checkpoint_id=folder / "c", files={"note": b"%d" % value})
    return folder / "c"


def read_both(checkpoint: Checkpoint) -> tuple[bytes, list[str]]:
    """Read what of a checkpoint is read in two moments."""
    note = checkpoint.read_file("note")
    return note, list(checkpoint.stored_keys("model").all())


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_read_anew(tmp_path: Path) -> None:
    place = write(tmp_path, 1)
    seen = []

    def read(checkpoint: Checkpoint) -> bytes:
        seen.append(checkpoint.read_file("note"))
        if len(seen) < 3:
            write(tmp_path, len(seen) + 1)
        assert list(checkpoint.stored_keys("model").all()) == ["w"]
        return seen[-1]

    assert read_checkpoint(place, read) == b"3"
    assert seen == [b"1", b"2", b"3"]


def test_a_checkpoint_that_is_always_replaced_or_removed_is_no_damage(tmp_path: Path) -> None:
    place = write(tmp_path, 0)
    count = 0

    def read(checkpoint: Checkpoint) -> None:
        nonlocal count
        count += 1
        write(tmp_path, count)
        checkpoint.stored_keys("model")

    with pytest.raises(ReplacedCheckpointError, match=r"c was replaced while it was read") as error:
        read_checkpoint(place, read)
    assert count == 5 and not isinstance(error.value, CorruptCheckpointError)

    def remove(checkpoint: Checkpoint) -> None:
        place.rename(hidden_name(place, "tmp"))
        checkpoint.read_file("nothing")

    with pytest.raises(ReplacedCheckpointError, match="c was removed while it was read"):
        read_checkpoint(place, remove)


def test_what_is_read_of_a_replaced_checkpoint_is_good_if_it_is_whole(tmp_path: Path) -> None:
    place = write(tmp_path, 1)
    with Checkpoint(place) as old:
        place.rename(tmp_path / "moved")
        write(tmp_path, 2)
        assert read_both(old) == (b"1", ["w"])


def test_a_file_that_is_written_to_while_it_is_read_is_told(tmp_path: Path) -> None:
    safetensors.torch.save_file({"w": torch.ones(4)}, tmp_path / "model.safetensors")
    with (
        pytest.raises(ReplacedCheckpointError, match=r"model.safetensors was written to while"),
        Checkpoint(tmp_path) as plain,
    ):
        assert list(plain.tensors("model")) == ["w"]
        safetensors.torch.save_file({"w": torch.zeros(8)}, tmp_path / "model.safetensors")


def test_a_reader_waits_while_a_save_has_the_checkpoint_under_another_name(tmp_path: Path) -> None:
    place = write(tmp_path, 1)
    aside = hidden_name(place, "old")
    place.rename(aside)
    back = threading.Timer(0.1, lambda: aside.rename(place))
    back.start()
    assert load_files(place, "note") == b"1"
    back.join()


def test_a_checkpoint_that_is_back_before_the_save_is_looked_for_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = write(tmp_path, 1)
    aside = hidden_name(place, "old")
    place.rename(aside)
    look = Path.glob

    def glob(folder: Path, pattern: str) -> Iterator[Path]:
        if aside.exists():
            aside.rename(place)
        return look(folder, pattern)

    monkeypatch.setattr(Path, "glob", glob)
    assert load_files(place, "note") == b"1"


def test_files_that_the_manifest_does_not_list_are_no_part_of_the_checkpoint(
    tmp_path: Path,
) -> None:
    place = write(tmp_path, 1)
    (place / "model.safetensors.index.json").write_text('{"weight_map": {"other": "x"}}')
    (place / "extra.safetensors").touch()
    with Checkpoint(place) as checkpoint:
        assert checkpoint.parts() == ["model"] and list(checkpoint.tensors("model")) == ["w"]
        assert MANIFEST_NAME not in checkpoint.names() and "extra.safetensors" not in (
            checkpoint.names()
        )
    (place / "mine.txt").write_text("hello")
    assert load_files(place, "mine.txt") == b"hello"


@pytest.mark.parametrize("name", ["model.safetensors", "note", "unified_ckpt.json", MANIFEST_NAME])
def test_a_fifo_in_a_checkpoint_is_an_error_and_no_hang(name: str, tmp_path: Path) -> None:
    place = write(tmp_path, 1)
    (place / name).unlink()
    os.mkfifo(place / name)
    began_s = time.monotonic()
    with pytest.raises(CorruptCheckpointError, match=f"{name}: is not a regular file"):
        load({"model": {"w": torch.zeros(4)}, "step": 0}, checkpoint_id=place)
        load_files(place, name)
    (problem,) = verify_checkpoint(place).problems
    assert problem.file == name and "is not a regular file" in problem.message
    assert time.monotonic() - began_s < 20.0


@pytest.mark.parametrize("name", ["", "a\0b"])
def test_a_name_that_names_nothing_is_refused(name: str) -> None:
    for call in (
        lambda: load({"model": {}}, checkpoint_id=name),
        lambda: save({"model": {}}, checkpoint_id=name),
        lambda: read_index(name),
        lambda: verify_checkpoint(name),
    ):
        with pytest.raises(ValueError, match="checkpoint_id is "):
            call()
    with pytest.raises(ValueError, match="has no last name"):
        save({"model": {}}, checkpoint_id="/")
    assert issubclass(CheckpointValueError, ValueError)


def test_numbered_files_without_an_index_are_read_if_all_are_there(tmp_path: Path) -> None:
    tensors = [torch.arange(3.0), torch.ones(2)]
    for number, tensor in enumerate(tensors, start=1):
        name = f"model-{number:05d}-of-00002.safetensors"
        safetensors.torch.save_file({f"w{number}": tensor}, tmp_path / name)
    back = {"w1": torch.zeros(3), "w2": torch.zeros(2)}
    load({"model": back}, checkpoint_id=tmp_path)
    assert [b.tolist() for b in back.values()] == [b.tolist() for b in tensors]
    assert set(read_index(tmp_path)) == {"w1", "w2"}
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"'model-00002-of-00002.*are missing"):
        load({"model": back}, checkpoint_id=tmp_path)
