"""What lies in a node's folder."""

import json
from pathlib import Path

import pytest
import torch

from unified_ckpt import save
from unified_ckpt.errors import DamagedCheckpointWarning
from unified_ckpt.tiers.copies import COPY_FILE, NodeCopy, free_copies, held_copies


def make_copy(folder: Path, step: int, token: str, rank: int = 0) -> NodeCopy:
    copy = NodeCopy(step=step, token=token * 16, ranks=(rank,), world_size=2)
    told = json.dumps(copy.to_json()).encode()
    save(
        {"model": {"w": torch.ones(50)}},
        checkpoint_id=folder / copy.name,
        files={COPY_FILE: told, "deep/config.json": b"{}"},
    )
    return copy


def test_copies_are_found_by_what_they_say_with_every_file(tmp_path: Path) -> None:
    made = make_copy(tmp_path, 3, "a", rank=1)
    (tmp_path / "ranks-00001" / ".step-4-hidden").mkdir()
    (tmp_path / "notes").mkdir()
    (found,) = held_copies(tmp_path)
    assert (found.step, found.token, found.ranks, found.world_size) == (3, "a" * 16, (1,), 2)
    sizes = {
        str(path.relative_to(tmp_path / made.name)): path.stat().st_size
        for path in (tmp_path / made.name).rglob("*")
        if path.is_file()
    }
    assert dict(found.files) == sizes and found.num_bytes == sum(sizes.values())
    assert NodeCopy.from_json(json.loads(json.dumps(found.to_json()))) == found
    assert held_copies(tmp_path / "none") == []


@pytest.mark.parametrize("damage", ["cut", "gone", "manifest", "renamed"])
def test_what_is_damaged_is_passed_over_by_name(tmp_path: Path, damage: str) -> None:
    place = tmp_path / make_copy(tmp_path, 3, "a").name
    if damage == "cut":
        (place / "model.safetensors").write_bytes(b"")
    elif damage == "gone":
        (place / COPY_FILE).unlink()
    elif damage == "manifest":
        (place / "manifest.json").write_text("{}")
    else:
        place.rename(place.with_name(f"step-9-{'b' * 16}"))
        assert held_copies(tmp_path) == []
        return
    with pytest.warns(DamagedCheckpointWarning, match=r"step-3-a+ is passed over"):
        assert held_copies(tmp_path) == []


def test_copies_are_freed_but_those_of_the_tokens_kept(tmp_path: Path) -> None:
    for rank in (0, 1):
        make_copy(tmp_path, 3, "a", rank)
    kept = make_copy(tmp_path, 4, "b", 1)
    (tmp_path / "notes").write_text("of a person")
    assert free_copies(tmp_path, keep=[kept.token]) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "ranks-00001"]
    assert [copy.name for copy in held_copies(tmp_path)] == [kept.name]
    assert free_copies(tmp_path, keep=()) == 1


def test_what_a_killed_save_left_of_ranks_that_are_elsewhere_now_is_freed_too(
    tmp_path: Path,
) -> None:
    kept = make_copy(tmp_path, 4, "b", 1)
    hidden = f"step-3-{'a' * 16}.unified-ckpt-tmp-{'c' * 16}"
    left = tmp_path / "ranks-00006" / f".{hidden}"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(bytes(1000))
    assert free_copies(tmp_path, keep=[kept.token]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["ranks-00001"]
