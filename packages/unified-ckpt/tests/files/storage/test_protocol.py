"""What every store must do, run against each of them: files, fsspec's memory, S3 over a socket."""

import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from ranktest import run_ranks
from unified_ckpt.files.storage import FsspecStore, LocalStore, ObjectStore, Retrying
from unified_ckpt.files.storage.location import as_target
from unified_ckpt.files.storage.protocol import PART_BYTES, part_bytes_for

KINDS = ["local", "fsspec", "retrying", "s3"]


def in_child(work: Callable[[], object]) -> None:
    """Run in a process of its own: clients of object stores do not survive the forks of tests."""
    run_ranks(lambda rank, world_size: work(), 1)


def open_store(kind: str, place: str) -> ObjectStore:
    if kind == "s3":
        return as_target("place", f"{place}/key").store
    if kind == "fsspec":
        import fsspec

        return FsspecStore(fsspec.filesystem("memory"), "bucket")
    return LocalStore(place) if kind == "local" else Retrying(LocalStore(place))


@pytest.fixture(params=KINDS)
def on_store(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Callable[[Callable[[ObjectStore], None]], None]:
    place = request.getfixturevalue("bucket") if request.param == "s3" else str(tmp_path / "store")
    return lambda work: in_child(lambda: work(open_store(request.param, place)))


def test_an_object_comes_back_whole_and_in_ranges(on_store: Callable[..., None]) -> None:
    def work(store: ObjectStore) -> None:
        whole = os.urandom(2 * PART_BYTES + 12345)
        view = memoryview(whole)
        cuts = [0, 10, 11, PART_BYTES + 5, 2 * PART_BYTES, len(whole)]
        buffers = (view[a:b] for a, b in pairwise(cuts))
        store.upload("run/data-1/model.safetensors", buffers, num_bytes=len(whole))
        store.upload("run/small", [b"ab", b"c"], num_bytes=3)
        assert store.size("run/data-1/model.safetensors") == len(whole)
        read = [
            bytes(store.read("run/data-1/model.safetensors", start, n))
            for start, n in [(0, 100), (PART_BYTES - 7, 20), (len(whole) - 9, 50)]
        ]
        assert read == [whole[:100], whole[PART_BYTES - 7 : PART_BYTES + 13], whole[-9:]]
        found = store.fetch("run/data-1/model.safetensors")
        assert found is not None and found.data == whole
        assert bytes(store.read("run/small", 1, 1)) == b"b"

    on_store(work)


def test_what_is_not_there_is_none_or_a_missing_file(on_store: Callable[..., None]) -> None:
    def work(store: ObjectStore) -> None:
        assert store.fetch("no/such") is None and store.size("no/such") is None
        assert list(store.keys("no")) == []
        store.delete(["no/such"])
        with pytest.raises(FileNotFoundError):
            store.read("no/such", 0, 4)

    on_store(work)


def test_a_swap_needs_the_version_that_is_there(on_store: Callable[..., None]) -> None:
    def work(store: ObjectStore) -> None:
        assert store.swap("run/m", b"first", old=None)
        assert not store.swap("run/m", b"second", old=None)
        found = store.fetch("run/m")
        assert found is not None and found.data == b"first"
        assert store.swap("run/m", b"second", old=found.version)
        assert not store.swap("run/m", b"third", old=found.version)
        assert store.fetch("run/m").data == b"second"
        version = store.fetch("run/m").version
        store.delete(["run/m"])
        assert not store.swap("run/m", b"fourth", old=version)
        assert store.fetch("run/m") is None

    on_store(work)


def test_keys_below_a_prefix_are_listed_and_deleted(on_store: Callable[..., None]) -> None:
    def work(store: ObjectStore) -> None:
        for key in ("run/a/1", "run/a/b/2", "run/ab", "other"):
            store.upload(key, [b"x"], num_bytes=1)
        assert sorted(store.keys("run/a")) == ["run/a/1", "run/a/b/2"]
        assert sorted(store.children("run")) == ["a", "ab"]
        assert sorted(store.children("run/a")) == ["1", "b"]
        assert list(store.children("nothing")) == []
        store.delete(store.keys("run/a"))
        assert list(store.keys("run/a")) == []
        assert sorted(store.keys("run")) == ["run/ab"]

    on_store(work)


def test_an_upload_that_fails_leaves_no_object(on_store: Callable[..., None]) -> None:
    def work(store: ObjectStore) -> None:
        def buffers():
            yield bytes(PART_BYTES)
            raise RuntimeError("the source failed")

        with pytest.raises(RuntimeError, match="the source failed"):
            store.upload("run/torn", buffers(), num_bytes=3 * PART_BYTES)
        assert store.size("run/torn") is None

    on_store(work)


def test_swaps_that_count_lose_no_count(tmp_path: Path, bucket: str) -> None:
    for kind, place in [("local", str(tmp_path)), ("s3", bucket)]:

        def fn(rank: int, world_size: int, kind: str = kind, place: str = place) -> int:
            store, won = open_store(kind, place), 0
            while won < 10:
                found = store.fetch("count")
                value = 0 if found is None else int(found.data.split()[0])
                version = None if found is None else found.version
                won += store.swap("count", b"%d by %d" % (value + 1, rank), old=version)
            return int(store.fetch("count").data.split()[0])

        assert max(run_ranks(fn, 3)) == 30, kind


def test_parts_grow_with_objects_that_would_have_too_many() -> None:
    assert part_bytes_for(10) == PART_BYTES
    huge = 2 * 10_000 * PART_BYTES + 1
    assert -(-huge // part_bytes_for(huge)) <= 10_000


class LosesSwaps(LocalStore):
    """Answers to the first swaps are lost; of a swap another one comes in between."""

    def __init__(self, root: Path, lost: list[str]) -> None:
        super().__init__(root)
        self.lost = lost

    def swap(self, key: str, data: bytes, *, old: str | None) -> bool:
        how = self.lost.pop(0) if self.lost else "none"
        if how == "before":
            raise ConnectionError("lost on its way there")
        won = super().swap(key, data, old=old)
        if how == "none":
            return won
        if how == "replaced":
            found = self.fetch(key)
            assert found is not None and super().swap(key, b"of another job", old=found.version)
        raise TimeoutError("lost on its way back")


@pytest.mark.parametrize(
    ("lost", "won", "left"),
    [
        (["before", "before"], True, b"new"),
        (["after"], True, b"new"),
        (["before", "after", "before"], True, b"new"),
        (["replaced"], False, b"of another job"),
    ],
)
def test_a_swap_whose_answer_was_lost_is_made_again_and_won_once(
    tmp_path: Path, lost: list[str], won: bool, left: bytes
) -> None:
    for old in (None, b"old"):
        key = f"manifest-{old}"
        plain = LocalStore(tmp_path)
        version = None
        if old is not None:
            assert plain.swap(key, old, old=None)
            found = plain.fetch(key)
            assert found is not None
            version = found.version
        assert Retrying(LosesSwaps(tmp_path, [*lost])).swap(key, b"new", old=version) is won
        found = plain.fetch(key)
        assert found is not None and found.data == left
    always = Retrying(LosesSwaps(tmp_path, ["before"] * 9), attempts=3)
    with pytest.raises(ConnectionError):
        always.swap("never", b"new", old=None)
    assert plain.fetch("never") is None
