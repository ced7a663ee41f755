import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moe_train.cache import claimed, default_cache_dir, locked, publish, write_atomic

HOLD = """
import sys, time
from pathlib import Path
from moe_train.cache import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_published_folder_replaces_the_old_one_and_leaves_no_rest(tmp_path: Path) -> None:
    target = tmp_path / "a" / "thing"
    for text in ("old", "new"):
        publish(target, lambda work, text=text: (work / "f").write_text(text))  # type: ignore[misc]
        assert (target / "f").read_text() == text
    assert [path.name for path in target.iterdir()] == ["f"]
    assert [path.name for path in target.parent.iterdir()] == ["thing"]


def test_what_another_process_has_published_meanwhile_stays(tmp_path: Path) -> None:
    target = tmp_path / "thing"

    def make(work: Path) -> None:
        (work / "f").write_text("mine")
        publish(target, lambda other: (other / "f").write_text("theirs"))  # type: ignore[arg-type, return-value]

    publish(target, make, is_made=target.is_dir)
    assert (target / "f").read_text() == "theirs"
    assert [path.name for path in tmp_path.iterdir()] == ["thing"]


def test_failing_maker_publishes_nothing(tmp_path: Path) -> None:
    def fail(work: Path) -> None:
        (work / "half").write_text("x")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        publish(tmp_path / "thing", fail)
    assert list(tmp_path.iterdir()) == []


def test_small_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    write_atomic(tmp_path / "sub" / "f", "one")
    write_atomic(tmp_path / "sub" / "f", "two")
    assert (tmp_path / "sub" / "f").read_text() == "two"
    assert len(list((tmp_path / "sub").iterdir())) == 1


def test_lock_of_a_running_process_is_waited_for_and_freed_by_its_death(tmp_path: Path) -> None:
    lock = tmp_path / "x.lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(lock)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(TimeoutError, match=r"held .*x\.lock for 0\.2 s"), locked(lock, 0.2):
        pass
    holder.kill()
    holder.communicate()
    started = time.monotonic()
    with locked(lock, 5.0):
        assert time.monotonic() - started < 5


def test_cache_is_in_the_users_cache_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "moe-train"
    monkeypatch.setenv("HOME", str(tmp_path / "someone"))
    for useless in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", useless)
        assert default_cache_dir() == tmp_path / "someone" / ".cache" / "moe-train"


def test_a_claimed_file_is_refused_at_once_until_its_holder_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    with pytest.raises(BlockingIOError, match=r"^in use "), claimed(path, "in use"):
        pass
    holder.kill()
    holder.communicate()
    own = rf"^in use \(held by process {os.getpid()} of .+\)$"
    with (
        claimed(path, "in use"),
        pytest.raises(BlockingIOError, match=own),
        claimed(path, "in use"),
    ):
        pass
