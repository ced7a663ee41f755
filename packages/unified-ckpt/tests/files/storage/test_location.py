"""Names of checkpoints in stores: which URLs are taken, and that no message shows secrets."""

import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from ranktest import collect_ranks, run_ranks
from unified_ckpt import get_last_checkpoint, load, rotate, save
from unified_ckpt.errors import CheckpointValueError, LoadError, SaveArgumentError, StoreError
from unified_ckpt.files.storage import FsspecStore, LocalStore, Location, as_target
from unified_ckpt.folders import find_fault
from unified_ckpt.tiers import TierOptions

STATE = {"model": {"w": torch.arange(6.0)}}


def test_a_path_stays_a_path_and_a_url_becomes_a_location(tmp_path: Path) -> None:
    assert as_target("x", str(tmp_path)) == tmp_path
    place = as_target("x", f"file://{tmp_path}/run//checkpoint-1/")
    assert isinstance(place, Location)
    assert str(place) == f"file://{tmp_path}/run/checkpoint-1"
    assert (place.name, place.parent.name) == ("checkpoint-1", "run")
    assert (place / "a").key == f"{place.key}/a" and as_target("x", place) is place


def test_a_network_folder_named_by_url_is_saved_to_and_loaded_from(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/run/checkpoint-1"
    report = save(STATE, checkpoint_id=url, files={"deep/config.json": b"{}"})
    again = {"model": {"w": torch.zeros(6)}}
    load(again, checkpoint_id=url)
    assert torch.equal(again["model"]["w"], STATE["model"]["w"])
    assert str(report.path) == url and not report.replaced
    assert save(STATE, checkpoint_id=url).replaced


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("s3://user:hunter2@bucket/run", "more than a bucket and a key"),
        ("s3://bucket/run?token=hunter2", "more than a bucket and a key"),
        ("s3://bucket", "has no key"),
        ("s3://bucket/../run", "has no key"),
        ("ftp://host/run", "known are file://"),
        ("file://tmp/run", "names the machine 'tmp'; expected .* file:///tmp/run"),
        ("s3:/bucket/run", "a URL that has lost a slash"),
        (Path("s3://bucket/run"), "a URL that has lost a slash"),
        (Path("fsspec+memory://disk/run"), "a URL that has lost a slash"),
    ],
)
def test_urls_that_cannot_be_used_are_refused_without_what_is_secret(
    url: str | Path, says: str
) -> None:
    for call in (save, load):
        with pytest.raises(ValueError, match=says) as caught:
            call({"model": {"w": torch.zeros(6)}}, checkpoint_id=url)
        assert "hunter2" not in str(caught.value)


def test_a_key_is_as_stores_list_it_whatever_slashes_it_is_given_with(tmp_path: Path) -> None:
    place = Location(store=LocalStore(tmp_path), key="run//checkpoint-1/")
    assert place.name == "checkpoint-1" and place.key == "run/checkpoint-1"
    for _ in range(2):
        save(STATE, checkpoint_id=place)
    assert len(list(tmp_path.rglob("model.safetensors"))) == 1, "what was replaced is gone"
    for key in ("/run", "../run", "run/./a"):
        with pytest.raises(ValueError, match=r"key='.*' of a Location; expected names joined"):
            Location(store=LocalStore(tmp_path), key=key)
    named = str(Location(store=FsspecStore(fsspec.filesystem("file"), f"{tmp_path}/a"), key="b"))
    assert named == f"file://{tmp_path}/a/b"


def test_what_a_folder_does_not_let_go_of_is_not_said_to_be_deleted() -> None:
    before = os.geteuid()
    with tempfile.TemporaryDirectory(prefix="unified-ckpt-") as name:
        os.chmod(name, 0o755)  # so that others than root read it
        for step in (1, 2):
            save(STATE, checkpoint_id=f"file://{name}/checkpoint-{step}")
        old = Path(name, "checkpoint-1")
        os.chmod(old, 0o555)
        if before == 0:
            os.seteuid(65534)
        try:
            with pytest.raises(StoreError, match=r"checkpoint-1: .* not deleted; who may write"):
                rotate(f"file://{name}", 1)
        finally:
            os.seteuid(before)
            os.chmod(old, 0o755)
        assert find_fault(old) is None


def test_what_works_on_directories_only_refuses_urls() -> None:
    with pytest.raises(CheckpointValueError, match="directories only"):
        TierOptions(folder="s3://bucket/run")


def test_any_protocol_of_fsspec_is_named_by_a_url_that_says_so(tmp_path: Path) -> None:
    for url in (
        f"fsspec+file://{tmp_path}/run/checkpoint-1",
        "fsspec+memory://disk/run/checkpoint-1",
    ):
        place = as_target("x", url)
        assert str(place) == url
        save(STATE, checkpoint_id=url)
        again = {"model": {"w": torch.zeros(6)}}
        load(again, checkpoint_id=str(place))
        assert torch.equal(again["model"]["w"], STATE["model"]["w"])
        assert get_last_checkpoint(url.rpartition("/")[0]).name == "checkpoint-1"
    assert (tmp_path / "run" / "checkpoint-1" / "manifest.json").is_file()
    with pytest.raises(CheckpointValueError, match="fsspec cannot open it"):
        as_target("x", "fsspec+nothing://host/run")


class LossyFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """Loses the connection at every third call that reads, asks for a size, moves or deletes.

    Every other one of these is lost on its way back: what was asked for is done.
    """

    protocol = "lossy"
    calls = 0
    lost: ClassVar[Counter[str]] = Counter()

    def _work(self, name: str, *args: object, **options: object) -> Any:
        number = type(self).calls = self.calls + 1
        if number % 6 == 1:
            self.lost[name] += 1
            raise ConnectionResetError(f"connection lost before {name}")
        done = getattr(super(), name)(*args, **options)
        if number % 6 == 4:
            self.lost[name] += 1
            raise ConnectionResetError(f"connection lost after {name}")
        return done

    def cat_file(self, *args: object, **options: object) -> Any:
        return self._work("cat_file", *args, **options)

    def info(self, *args: object, **options: object) -> Any:
        return self._work("info", *args, **options)

    def rm_file(self, *args: object, **options: object) -> Any:
        return self._work("rm_file", *args, **options)

    def mv(self, *args: object, **options: object) -> Any:
        return self._work("mv", *args, **options)


def test_lost_connections_of_a_file_system_that_does_not_try_again_are_made_again() -> None:
    fsspec.register_implementation("lossy", LossyFileSystem, clobber=True)
    url = "fsspec+lossy://disk/run/checkpoint-1"
    for start in range(6):  # so that each call is lost on its way there and back
        LossyFileSystem.calls += start
        for number in (1.0, 2.0):
            save({"model": {"w": torch.full((6,), number)}}, checkpoint_id=url)
            again = {"model": {"w": torch.zeros(6)}}
            load(again, checkpoint_id=url)
            assert again["model"]["w"].tolist() == [number] * 6
    assert min(LossyFileSystem.lost[name] for name in ("cat_file", "info", "mv", "rm_file")) >= 4
    assert not [name for name in LossyFileSystem.store if "data-swap-" in name]


def test_no_message_of_a_client_shows_the_credentials(bucket: str) -> None:
    def fn(rank: int, world_size: int) -> None:
        load({"model": {"w": torch.zeros(6)}}, checkpoint_id="s3://no-such-bucket/run/checkpoint-1")

    (outcome,) = collect_ranks(fn, 1)
    assert outcome.error_type == LoadError.__name__, outcome.error
    assert "of-the-test" not in outcome.error


def test_a_process_that_was_forked_from_a_user_of_a_store_is_told_so(bucket: str) -> None:
    def fn(rank: int, world_size: int) -> str:
        place = f"{bucket}/run/checkpoint-1"
        save(STATE, checkpoint_id=place)
        receiver, sender = os.pipe()
        if os.fork() == 0:
            try:
                load(STATE, checkpoint_id=place)
            except LoadError as error:
                os.write(sender, str(error).encode())
            os._exit(0)
        return os.read(receiver, 4096).decode()

    (error,) = run_ranks(fn, 1)
    assert "was forked" in error and "spawn" in error


def test_ranks_that_name_different_places_are_told_so(tmp_path: Path) -> None:
    def fn(rank: int, world_size: int) -> None:
        place = Location(store=LocalStore(tmp_path), key=f"run-{rank}/checkpoint-1")
        with pytest.raises(SaveArgumentError, match="ranks disagree about target"):
            save({"model": []}, checkpoint_id=place)

    run_ranks(fn, 2)
