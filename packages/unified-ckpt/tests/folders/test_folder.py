import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from unified_ckpt import Shard, get_last_checkpoint, rotate, save
from unified_ckpt.errors import DamagedCheckpointWarning, StoreError
from unified_ckpt.folders import check_steps_free, find_fault
from unified_ckpt.folders.folder import is_complete


def put(folder: Path, step: int) -> Path:
    tensor = torch.full((3,), float(step))
    shard = Shard.of("w", tensor, global_shape=(3,), offset=(0,))
    files = {"config.json": b"{}"}
    return save({"model": [shard]}, checkpoint_id=folder / f"checkpoint-{step}", files=files).path


def test_the_newest_is_chosen_by_number_not_by_name_or_date(tmp_path: Path) -> None:
    for step in (100, 20, 9):
        put(tmp_path, step)
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "my-checkpoint-999").mkdir()
    assert get_last_checkpoint(tmp_path) == tmp_path / "checkpoint-100"


def test_no_folder_and_no_checkpoint_give_none(tmp_path: Path) -> None:
    assert get_last_checkpoint(tmp_path / "nothing") is None
    assert get_last_checkpoint(tmp_path) is None


@pytest.mark.parametrize("damage", ["missing file", "short file", "no manifest", "bad manifest"])
def test_a_newer_checkpoint_that_is_not_complete_is_passed_over(
    damage: str, tmp_path: Path
) -> None:
    put(tmp_path, 1)
    new = put(tmp_path, 2)
    if damage == "missing file":
        (new / "model.safetensors").unlink()
    elif damage == "short file":
        os.truncate(new / "model.safetensors", 20)
    elif damage == "no manifest":
        (new / "manifest.json").unlink()
    else:
        (new / "manifest.json").write_text("{}")
    assert not is_complete(new)
    with pytest.warns(DamagedCheckpointWarning, match=r"checkpoint-2 is passed over, an .*: "):
        assert get_last_checkpoint(tmp_path) == tmp_path / "checkpoint-1"


def flip(path: Path, offset: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize(("name", "offset"), [("model.safetensors", 30), ("config.json", 1)])
def test_a_damaged_header_or_small_file_is_found_without_reading_the_tensors(
    name: str, offset: int, tmp_path: Path
) -> None:
    put(tmp_path, 1)
    flip(put(tmp_path, 2) / name, offset)
    with pytest.warns(DamagedCheckpointWarning, match=rf"checkpoint-2/{name}"):
        assert get_last_checkpoint(tmp_path) == tmp_path / "checkpoint-1"


def test_a_damaged_tensor_is_found_when_all_is_verified(tmp_path: Path) -> None:
    put(tmp_path, 1)
    new = put(tmp_path, 2)
    flip(new / "model.safetensors", -1)
    assert get_last_checkpoint(tmp_path) == new
    with pytest.warns(DamagedCheckpointWarning, match=r"model.safetensors: 'w': bytes"):
        assert get_last_checkpoint(tmp_path, verify="full") == tmp_path / "checkpoint-1"
    for look in (get_last_checkpoint, find_fault):
        with pytest.raises(ValueError, match="verify='all'; expected 'quick' or 'full'"):
            look(tmp_path, verify="all")


@contextmanager
def one_descriptor_left() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = max(map(int, os.listdir("/proc/self/fd"))) + 8
    held = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        for _ in range(limit):
            held.append(os.open("/", os.O_RDONLY))
    except OSError:
        os.close(held.pop())
    try:
        yield
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_process_without_descriptors_passes_no_checkpoint_over(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        put(tmp_path, step)
    for look in (lambda: get_last_checkpoint(tmp_path), lambda: rotate(tmp_path, 1)):
        with one_descriptor_left(), pytest.raises(StoreError, match="raise the limit of this proc"):
            look()
    assert get_last_checkpoint(tmp_path) == tmp_path / "checkpoint-3"
    assert len(list(tmp_path.iterdir())) == 3


def test_rotation_keeps_what_is_protected(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        put(tmp_path, step)
    removed = rotate(tmp_path, 1, protect=[tmp_path / "checkpoint-2"])
    assert [path.name for path in removed] == ["checkpoint-3", "checkpoint-1"]


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_what_is_protected_may_be_named_by_text_and_must_be_in_the_folder(
    scheme: str, tmp_path: Path
) -> None:
    for step in (1, 2, 3):
        save({"model": {"w": torch.ones(2)}}, checkpoint_id=f"{scheme}{tmp_path}/checkpoint-{step}")
    folder = f"{scheme}{tmp_path}"
    with pytest.raises(TypeError, match=r"protect is .*checkpoint-1; expected a list of such"):
        rotate(folder, 1, protect=f"{folder}/checkpoint-1")
    for strange in ("checkpoint-1", f"{folder}-old/checkpoint-1"):
        with pytest.raises(ValueError, match=r"checkpoint-1, which is not in .*protect nothing"):
            rotate(folder, 1, protect=[strange])
    for named in (f"{folder}/checkpoint-1", tmp_path / "checkpoint-1"):
        rotate(folder, 1, protect=[named])
        assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-1", "checkpoint-3"]


def test_rotation_keeps_the_newest_complete_ones_and_touches_nothing_else(tmp_path: Path) -> None:
    for step in (1, 2, 3, 40):
        put(tmp_path, step)
    (put(tmp_path, 50) / "model.safetensors").unlink()
    (tmp_path / "checkpoint-0").mkdir()
    (tmp_path / "logs").mkdir()
    assert rotate(tmp_path, 2) == [tmp_path / "checkpoint-2", tmp_path / "checkpoint-1"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "checkpoint-0", "checkpoint-3", "checkpoint-40", "checkpoint-50", "logs",
    ]  # fmt: skip
    assert rotate(tmp_path, 2) == []


def test_rotation_removes_the_link_to_a_checkpoint_elsewhere_and_not_the_checkpoint(
    tmp_path: Path,
) -> None:
    archived = put(tmp_path / "archive", 1)
    put(tmp_path / "run", 2)
    (tmp_path / "run" / "checkpoint-1").symlink_to(archived)
    assert rotate(tmp_path / "run", 1) == [tmp_path / "run" / "checkpoint-1"]
    assert is_complete(archived)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["checkpoint-2"]


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_rotation_keeps_what_links_lead_to_and_counts_no_link(scheme: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (1, 2, 3, 4, 5, 6):
        save({"model": {"w": torch.ones(2)}}, checkpoint_id=f"{scheme}{run}/checkpoint-{step}")
    (run / "best").symlink_to("checkpoint-2")
    (run / "weights").symlink_to(next((run / "checkpoint-3").rglob("model.safetensors")))
    (run / "checkpoint-9").symlink_to("checkpoint-4")
    (run / "checkpoint-0").symlink_to("checkpoint-6")
    (tmp_path / "again").symlink_to("run")
    removed = rotate(f"{scheme}{tmp_path}/again", 1)
    assert [path.name for path in removed] == ["checkpoint-5", "checkpoint-1"]
    for name in ("best", *(f"checkpoint-{step}" for step in (0, 2, 3, 4, 6, 9))):
        assert find_fault(f"{scheme}{run}/{name}") is None, name
    (run / "checkpoint-9").unlink()
    (run / "checkpoint-8").symlink_to("checkpoint-0")  # a link to a link
    assert [path.name for path in rotate(f"{scheme}{run}", 1)] == ["checkpoint-4"]


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_an_old_link_goes_and_not_what_it_leads_to(scheme: str, tmp_path: Path) -> None:
    for place in ("archive/checkpoint-1", "run/checkpoint-2"):
        save({"model": {"w": torch.ones(2)}}, checkpoint_id=f"{scheme}{tmp_path}/{place}")
    (tmp_path / "run" / "checkpoint-1").symlink_to("../archive/checkpoint-1")
    assert [path.name for path in rotate(f"{scheme}{tmp_path}/run", 1)] == ["checkpoint-1"]
    assert find_fault(f"{scheme}{tmp_path}/archive/checkpoint-1") is None
    assert not (tmp_path / "run" / "checkpoint-1").is_symlink()


def test_rotation_refuses_to_remove_everything(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep=0 would remove every checkpoint"):
        rotate(tmp_path, 0)


def test_a_step_is_free_if_nothing_stands_there_that_a_save_may_not_replace(tmp_path: Path) -> None:
    check_steps_free(tmp_path / "nothing", range(100))
    put(tmp_path, 1)
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-7").mkdir()
    (tmp_path / "checkpoint-7" / "notes.txt").write_text("mine")
    (tmp_path / "checkpoint-9").write_text("a file")
    (tmp_path / "checkpoint-10").symlink_to("checkpoint-1")
    with pytest.raises(ValueError, match="checkpoint-10 is a link to checkpoint-1, which a save"):
        check_steps_free(tmp_path, [10])
    check_steps_free(tmp_path, [*range(7), 8])
    for step in (7, 9):
        with pytest.raises(ValueError, match=rf"checkpoint-{step} is no .*step {step}; move it aw"):
            check_steps_free(tmp_path, range(step, 10))
