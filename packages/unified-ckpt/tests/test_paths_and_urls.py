"""One checkpoint of a file system, named by its path and by its `file://` URL."""

from pathlib import Path

import pytest
import torch

from unified_ckpt import (
    CheckpointManager,
    async_save,
    get_last_checkpoint,
    load,
    rotate,
    save,
    verify_checkpoint,
)
from unified_ckpt.background.saver import AsyncSaver
from unified_ckpt.files.format import manifest as manifest_module
from unified_ckpt.files.storage import LocalStore, Location, as_target


def state(value: float) -> dict[str, dict[str, torch.Tensor]]:
    return {"model": {f"w{n}": torch.full((4,), value) for n in range(9)}}


def value_of(checkpoint: object) -> float:
    found = state(-1.0)
    load(found, checkpoint_id=checkpoint)  # type: ignore[arg-type]
    (value,) = {v for tensor in found["model"].values() for v in tensor.tolist()}
    return float(value)


@pytest.mark.parametrize("inline_bytes", [manifest_module.INLINE_BYTES, 0])
def test_what_was_saved_by_a_url_is_found_and_read_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inline_bytes: int
) -> None:
    monkeypatch.setattr(manifest_module, "INLINE_BYTES", inline_bytes)
    for step in (1, 2):
        save(state(float(step)), checkpoint_id=f"file://{tmp_path}/run/checkpoint-{step}")
    run = tmp_path / "run"
    assert get_last_checkpoint(run, verify="full") == run / "checkpoint-2"
    assert value_of(run / "checkpoint-2") == 2.0
    assert not verify_checkpoint(run / "checkpoint-2").problems
    with CheckpointManager(run) as manager:
        assert manager.resume(value_of) == (run / "checkpoint-2", 2.0)
    assert rotate(run, keep=1) == [run / "checkpoint-1"]
    assert str(get_last_checkpoint(f"file://{run}")) == f"file://{run}/checkpoint-2"


@pytest.mark.parametrize("inline_bytes", [manifest_module.INLINE_BYTES, 0])
def test_a_save_by_path_replaces_all_that_one_by_url_had_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inline_bytes: int
) -> None:
    monkeypatch.setattr(manifest_module, "INLINE_BYTES", inline_bytes)
    place = tmp_path / "checkpoint-1"
    save(state(1.0), checkpoint_id=f"file://{place}", files={"sub/config.json": b"{}"})
    save(state(2.0), checkpoint_id=place)  # a warning of kept files would be an error
    assert value_of(place) == 2.0 and not [p.name for p in place.iterdir() if p.is_dir()]
    assert not list(place.glob(".*"))


def test_a_save_by_path_keeps_what_others_put_beside_one_by_url(tmp_path: Path) -> None:
    place = tmp_path / "checkpoint-1"
    save(state(1.0), checkpoint_id=f"file://{place}")
    (place / "notes.txt").write_text("mine")
    with pytest.warns(UserWarning, match=r"it keeps the files \['notes\.txt'\]"):
        save(state(2.0), checkpoint_id=place)
    assert (place / "notes.txt").read_text() == "mine" and value_of(place) == 2.0


@pytest.mark.parametrize("inline_bytes", [manifest_module.INLINE_BYTES, 0])
def test_a_save_by_url_leaves_no_weights_of_one_by_path_beside_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inline_bytes: int
) -> None:
    """Transformers would read those that lie at the top."""
    monkeypatch.setattr(manifest_module, "INLINE_BYTES", inline_bytes)
    place = tmp_path / "checkpoint-1"
    save(state(1.0), checkpoint_id=place, files={"config.json": b"{}"})
    (place / "notes.txt").write_text("mine")
    save(state(2.0), checkpoint_id=f"file://{place}")
    assert value_of(f"file://{place}") == 2.0
    assert {p.name for p in place.iterdir() if p.is_file() and not p.name.startswith(".")} == {
        "manifest.json",
        "notes.txt",
    }


@pytest.mark.parametrize("name", ["a%20b", "50%", "a#b", "a?b", "a\nb", "a b", "é\udcff"])
def test_the_url_of_a_place_on_disk_leads_to_it_whatever_its_name(
    tmp_path: Path, name: str
) -> None:
    for place in (
        Location(store=LocalStore(tmp_path), key=f"run/{name}"),
        Location(store=LocalStore(tmp_path / name), key="checkpoint-1"),
    ):
        again = as_target("x", str(place))
        assert isinstance(again, Location) and again.on_disk == place.on_disk


def test_a_save_in_the_background_goes_where_the_url_says(
    saver: AsyncSaver, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/of%2520May"  # a folder whose name has a %20 in it
    response = async_save(state(3.0), checkpoint_id=url, saver=saver)
    response.upload_completion.result(timeout=30)
    assert [path.name for path in tmp_path.iterdir()] == ["of%20May"] and value_of(url) == 3.0
