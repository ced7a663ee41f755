import os
import tempfile
import warnings
from pathlib import Path

import pytest
import torch

from unified_ckpt import load, save, verify_checkpoint
from unified_ckpt.errors import KeptFilesWarning, SaveError
from unified_ckpt.files import system
from unified_ckpt.saving.commit import kept_files
from unified_ckpt.saving.commit.commit import Staging


def write(folder: Path, value: float, **files: bytes) -> Path:
    state = {"model": {"w": torch.full((4,), float(value))}}
    save(state, checkpoint_id=folder / "c", files=files)
    return folder / "c"


def value_of(place: Path) -> float:
    want = torch.zeros(4)
    load({"model": {"w": want}}, checkpoint_id=place)
    return float(want[0])


@pytest.mark.parametrize("can", ["exchange and link", "link", "exchange"])
def test_files_that_others_put_into_a_checkpoint_are_kept_and_named(
    can: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "no second names here")

    if "exchange" not in can:
        monkeypatch.setattr(system, "_renameat2", lambda a, b: 38)
    if "link" not in can:
        monkeypatch.setattr(os, "link", refuse)
    place = write(tmp_path, 1, ours=b"1", gone=b"1")
    (place / "notes.txt").write_text("mine")
    (place / "results").mkdir()
    (place / "results" / "scores.json").write_text("{}")
    with pytest.warns(KeptFilesWarning, match=r"\['notes.txt', 'results/scores.json'\]"):
        write(tmp_path, 2, ours=b"2")
    assert (place / "notes.txt").read_text() == "mine"
    assert (place / "results" / "scores.json").read_text() == "{}"
    assert (place / "ours").read_bytes() == b"2" and not (place / "gone").exists()
    assert value_of(place) == 2.0 and verify_checkpoint(place).problems == ()
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_file_of_others_that_the_new_checkpoint_would_cover_stops_the_save(
    tmp_path: Path,
) -> None:
    place = write(tmp_path, 1)
    (place / "notes").write_text("mine")
    with pytest.raises(SaveError, match=r"notes was not written by the save that is there .* move"):
        write(tmp_path, 2, notes=b"ours")
    assert (place / "notes").read_text() == "mine" and value_of(place) == 1.0
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_file_that_comes_while_the_checkpoint_is_replaced_is_kept_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = write(tmp_path, 1)
    real = kept_files.keep_files

    def late(
        old: Path, new: Path, *, published_with: tuple[str, ...] | None = None
    ) -> tuple[str, ...]:
        kept = real(old, new, published_with=published_with)
        if published_with is None:
            (old / "notes").write_text("late")
            (old / "ours").write_text("late")
        return kept

    monkeypatch.setattr("unified_ckpt.saving.commit.commit.keep_files", late)
    with pytest.warns(KeptFilesWarning, match=r"\['notes', 'ours.kept'\]"):
        write(tmp_path, 2, ours=b"2")
    texts = [(place / name).read_text() for name in ("notes", "ours", "ours.kept")]
    assert texts == ["late", "2", "late"]


def test_where_the_manifest_is_damaged_a_replacing_save_works_and_keeps_what_it_cannot_tell(
    tmp_path: Path,
) -> None:
    place = write(tmp_path, 1, ours=b"1", other=b"1")
    (place / "manifest.json").write_text("{}")
    with pytest.warns(KeptFilesWarning, match=r"\['other'\]"):
        write(tmp_path, 2, ours=b"2")
    assert value_of(place) == 2.0 and (place / "ours").read_bytes() == b"2"


def test_a_checkpoint_of_nobody_else_is_replaced_without_a_word(tmp_path: Path) -> None:
    write(tmp_path, 1, a=b"1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write(tmp_path, 2, b=b"2")
    staging = Staging.make(tmp_path / "new")
    staging.close()


def test_a_file_of_another_file_system_is_copied(tmp_path: Path) -> None:
    memory = Path("/dev/shm")
    if memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("needs two file systems")
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        old = write(Path(folder), 1.0)
        (old / "notes.txt").write_text("mine")
        assert kept_files.keep_files(old, tmp_path) == ("notes.txt",)
    assert (tmp_path / "notes.txt").read_text() == "mine"
