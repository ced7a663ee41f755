"""Names of checkpoints in stores: which URLs are taken, and that no message shows secrets."""

import os
from pathlib import Path

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from ranktest import collect_ranks, run_ranks
from unified_ckpt import get_last_checkpoint, load, save
from unified_ckpt.errors import CheckpointValueError, LoadError, SaveArgumentError
from unified_ckpt.files.storage import LocalStore, Location, as_target
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
    ],
)
def test_urls_that_cannot_be_used_are_refused_without_what_is_secret(url: str, says: str) -> None:
    for call in (save, load):
        with pytest.raises(ValueError, match=says) as caught:
            call({"model": {"w": torch.zeros(6)}}, checkpoint_id=url)
        assert "hunter2" not in str(caught.value)


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
    """Loses the connection at every second call that reads a range, asks for a size or deletes.

    The exchange of a manifest is tried once (`Retrying.swap`), and begins with a whole file.
    """

    protocol = "lossy"
    calls = 0
    lost = 0

    def _work(self) -> None:
        type(self).calls += 1
        if self.calls % 2:
            type(self).lost += 1
            raise ConnectionResetError(f"connection lost at call {self.calls}")

    def cat_file(self, *args: object, **options: object) -> bytes:
        if "start" in options:
            self._work()
        return bytes(super().cat_file(*args, **options))

    def info(self, *args: object, **options: object) -> object:
        self._work()
        return super().info(*args, **options)

    def rm_file(self, *args: object, **options: object) -> None:
        self._work()
        super().rm_file(*args, **options)


def test_lost_connections_of_a_file_system_that_does_not_try_again_are_made_again() -> None:
    fsspec.register_implementation("lossy", LossyFileSystem, clobber=True)
    url = "fsspec+lossy://disk/run/checkpoint-1"
    for number in (1.0, 2.0):
        save({"model": {"w": torch.full((6,), number)}}, checkpoint_id=url)
        again = {"model": {"w": torch.zeros(6)}}
        load(again, checkpoint_id=url)
        assert again["model"]["w"].tolist() == [number] * 6
    assert LossyFileSystem.lost >= 8


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
