"""Commits in a store: of two saves one wins, lost answers are found out, leftovers go."""

import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from unified_ckpt import load, save
from unified_ckpt.errors import CheckpointValueError, LeftoverFilesWarning, LoadError, SaveError
from unified_ckpt.files.storage import Fetched, LocalStore, Location
from unified_ckpt.folders.in_store import remove_stored
from unified_ckpt.plans.checkpoint import is_stored
from unified_ckpt.saving.commit import Draft


def place_in(folder: Path) -> Location:
    return Location(store=LocalStore(folder), key="run/checkpoint-1")


def fill(draft: Draft) -> None:
    where = draft.folder / "file"
    where.store.upload(where.key, [b"x"], num_bytes=1)


@dataclass
class _SwapsBadly(LocalStore):
    """A folder whose swaps answer with a lost connection, after or before the work."""

    root: Path
    done: bool

    def swap(self, key: str, data: bytes, *, old: str | None) -> bool:
        if self.done:
            super().swap(key, data, old=old)
        raise ConnectionError("lost")


class _SwapsLate(LocalStore):
    """A folder whose swap is on its way when the client gives up."""

    def swap(self, key: str, data: bytes, *, old: str | None) -> bool:
        self.arrive = lambda: LocalStore.swap(self, key, data, old=old)
        raise ConnectionError("lost")


class _DiesInSwaps(LocalStore):
    """A folder whose client is killed when a swap has written what it will rename."""

    def fetch(self, key: str) -> Fetched | None:
        if any("data-swap-" in name for name in self.keys("run")):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().fetch(key)


@dataclass
class _KeepsAll(LocalStore):
    """A folder that does not delete."""

    root: Path

    def delete(self, keys: Iterable[str]) -> None:
        raise PermissionError("no right to delete")


def test_old_files_that_a_store_does_not_delete_are_one_line_and_the_next_save_deletes_them(
    tmp_path: Path,
) -> None:
    place, first = place_in(tmp_path), torch.zeros(3)
    save({"model": {"w": first}}, checkpoint_id=place)
    before = set(place.store.keys(place.key))
    stuck = Location(store=_KeepsAll(tmp_path), key=place.key)
    with pytest.warns(LeftoverFilesWarning, match="no right to delete.* next save") as said:
        save({"model": {"w": first + 1}}, checkpoint_id=stuck)
    assert len(said) == 1 and before < set(place.store.keys(place.key))
    failed = Draft.make(place)
    fill(failed)
    failed.target = stuck
    with pytest.warns(LeftoverFilesWarning, match="what a failed save had written was not deleted"):
        failed.close()
    save({"model": {"w": first + 2}}, checkpoint_id=place)
    again = torch.zeros(3)
    load({"model": {"w": again}}, checkpoint_id=place)
    assert again.tolist() == [2, 2, 2]
    assert len(set(place.store.keys(place.key))) == len(before)


def test_of_two_saves_of_one_name_the_second_to_commit_fails(tmp_path: Path) -> None:
    place = place_in(tmp_path)
    first, second = Draft.make(place), Draft.make(place)
    fill(first)
    fill(second)
    assert not second.commit({}, lambda: {})
    with pytest.raises(SaveError, match="another save has written"):
        first.commit({}, lambda: {})
    first.close()
    second.close()
    keys = {key.rpartition("/")[0] for key in place.store.keys(place.key) if "data-" in key}
    assert keys == {second.folder.key}


def test_what_a_killed_save_left_goes_with_the_next_and_what_others_put_there_stays(
    tmp_path: Path,
) -> None:
    place = place_in(tmp_path)
    fill(Draft.make(place))  # and is killed
    save({"model": {"w": torch.zeros(3)}}, checkpoint_id=place)
    notes = place / "notes.txt"
    place.store.upload(notes.key, [b"mine"], num_bytes=4)
    report = save({"model": {"w": torch.ones(3)}}, checkpoint_id=place)
    assert report.replaced and place.store.fetch(notes.key).data == b"mine"
    assert len({key.split("/")[2] for key in place.store.keys(place.key)}) == 3
    again = {"model": {"w": torch.zeros(3)}}
    load(again, checkpoint_id=place)
    assert again["model"]["w"].tolist() == [1.0] * 3


def test_a_name_of_other_objects_is_not_taken(tmp_path: Path) -> None:
    place = place_in(tmp_path)
    place.store.upload((place / "data.csv").key, [b"1"], num_bytes=1)
    with pytest.raises(CheckpointValueError, match="choose another checkpoint_id"):
        Draft.make(place)


@pytest.mark.parametrize("done", [True, False])
def test_a_lost_answer_to_the_commit_is_found_out(done: bool, tmp_path: Path) -> None:
    place = Location(store=_SwapsBadly(tmp_path, done), key="run/checkpoint-1")
    state = {"model": {"w": torch.ones(3)}}
    if done:
        save(state, checkpoint_id=place)
        load(state, checkpoint_id=place)
        return
    with pytest.raises(SaveError, match=r"'commit'.*lost"):
        save(state, checkpoint_id=place)
    # It may still arrive, so the files that it names are kept until the next save.
    assert place.store.keys(place.key)


def test_a_failed_save_deletes_what_it_wrote(tmp_path: Path) -> None:
    place = place_in(tmp_path)
    draft = Draft.make(place)
    fill(draft)
    draft.close()
    assert not place.store.keys("run") and not (tmp_path / "run").exists()


def test_who_cleans_beside_a_save_that_runs_makes_it_fail_and_not_its_readers(
    tmp_path: Path,
) -> None:
    place = place_in(tmp_path)
    draft = Draft.make(place)
    fill(draft)
    assert Draft.clean(place)
    with pytest.raises(SaveError, match="another job has removed the files"):
        draft.commit({}, lambda: {})
    assert not is_stored(place) and place.store.keys(place.key) == [f"{place.key}/manifest.json"]
    save({"model": {"w": torch.ones(3)}}, checkpoint_id=place)
    assert is_stored(place)


def test_a_manifest_that_comes_after_its_save_was_cleaned_up_is_refused(tmp_path: Path) -> None:
    """The save has sent it and was killed; the store brings it after a tombstone."""
    place = place_in(tmp_path)
    for _ in range(3):
        draft = Draft.make(place)
        fill(draft)
        late = _SwapsLate(tmp_path)
        draft.target = Location(store=late, key=place.key)
        with pytest.raises(ConnectionError):
            draft.commit({}, lambda: {})
        assert Draft.clean(place)
        assert not late.arrive() and not is_stored(place)
    with pytest.raises(LoadError, match="no such checkpoint"):
        load({"model": {"w": torch.ones(3)}}, checkpoint_id=place)
    assert not save({"model": {"w": torch.ones(3)}}, checkpoint_id=place).replaced
    assert {key.split("/")[2][:5] for key in place.store.keys(place.key)} == {"data-", "manif"}


def test_a_save_that_was_killed_in_its_swap_leaves_its_name_free(tmp_path: Path) -> None:
    place = place_in(tmp_path)
    if not (pid := os.fork()):
        dying = Location(store=_DiesInSwaps(tmp_path), key=place.key)
        draft = Draft.make(dying)
        fill(draft)
        draft.commit({}, lambda: {})
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    assert len(place.store.keys(place.key)) == 2  # a file of the save, and one of the swap
    Draft.check_free(place)
    assert Draft.clean(place) and len(place.store.keys(place.key)) == 1


def test_who_cleans_a_moment_too_late_leaves_the_checkpoint_alone(tmp_path: Path) -> None:
    """The cleaner has seen no manifest; before it deletes anything, the save commits."""
    place = place_in(tmp_path)

    class Late(LocalStore):
        def swap(self, key: str, data: bytes, *, old: str | None) -> bool:
            drafts.pop().commit({}, lambda: {})
            return super().swap(key, data, old=old)

    drafts = [Draft.make(place)]
    fill(drafts[0])
    assert not Draft.clean(Location(store=Late(tmp_path), key=place.key))
    assert place.store.size((place / "manifest.json").key) is not None
    assert [key for key in place.store.keys(place.key) if key.endswith("/file")]


def test_a_save_over_a_checkpoint_that_is_removed_meanwhile_fails(tmp_path: Path) -> None:
    place = place_in(tmp_path)
    save({"model": {"w": torch.zeros(3)}}, checkpoint_id=place)
    draft = Draft.make(place)
    remove_stored(place)
    with pytest.raises(SaveError, match="another save"):
        draft.commit({}, lambda: {})
