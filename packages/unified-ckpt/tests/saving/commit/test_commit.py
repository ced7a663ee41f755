import errno
import fcntl
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from unified_ckpt.saving.commit import commit
from unified_ckpt.saving.commit.commit import Staging, clean_leftovers, hidden_name


def fill(folder: Path, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "manifest.json").write_text(text)


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def publish(target: Path, text: str) -> bool:
    staging = Staging.make(target)
    try:
        fill(staging.folder, text)
        return staging.publish()
    finally:
        staging.close()


@pytest.mark.parametrize("can_exchange", [True, False])
def test_publishing_creates_and_replaces(
    can_exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_exchange:
        monkeypatch.setattr(commit, "exchange", lambda a, b: False)
    assert publish(tmp_path / "c", "one") is False
    assert publish(tmp_path / "c", "two") is True
    assert (tmp_path / "c" / "manifest.json").read_text() == "two"
    assert names(tmp_path) == ["c"]


def test_a_replacement_without_exchange_that_fails_gives_the_old_one_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit, "exchange", lambda a, b: False)
    publish(tmp_path / "c", "one")
    staging = Staging.make(tmp_path / "c")
    fill(staging.folder, "two")
    real = commit.rename

    def rename(old: Path, new: Path) -> None:
        if old == staging.folder:
            raise OSError(5, "Input/output error")
        real(old, new)

    monkeypatch.setattr(commit, "rename", rename)
    with pytest.raises(OSError, match="Input/output"):
        staging.publish()
    staging.close()
    assert names(tmp_path) == ["c"]
    assert (tmp_path / "c" / "manifest.json").read_text() == "one"


def test_a_checkpoint_that_stepped_aside_before_a_crash_gets_its_name_back(tmp_path: Path) -> None:
    fill(hidden_name(tmp_path / "c", "old"), "one")
    fill(hidden_name(tmp_path / "c", "tmp"), "half")
    clean_leftovers(tmp_path)
    assert names(tmp_path) == ["c"]
    assert (tmp_path / "c" / "manifest.json").read_text() == "one"
    fill(hidden_name(tmp_path / "c", "old"), "zero")
    clean_leftovers(tmp_path)
    assert (tmp_path / "c" / "manifest.json").read_text() == "one"
    assert names(tmp_path) == ["c"]


def test_only_leftovers_of_this_package_are_removed(tmp_path: Path) -> None:
    mine = hidden_name(tmp_path / "c", "tmp")
    keep = [".git", "c", ".c.unified-ckpt-tmp-123", "c.unified-ckpt-tmp-0123456789abcdef"]
    for name in (mine.name, *keep):
        (tmp_path / name).mkdir()
    (tmp_path / ".d.unified-ckpt-tmp-0123456789abcdef").write_text("a file")
    assert clean_leftovers(tmp_path) == [mine]
    assert names(tmp_path) == sorted([*keep, ".d.unified-ckpt-tmp-0123456789abcdef"])
    assert clean_leftovers(tmp_path / "nothing") == []


def test_a_save_that_runs_in_another_process_is_left_alone_until_it_dies(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        Staging.make(tmp_path / "c")
        os.write(write_end, b"x")
        time.sleep(60)
        os._exit(0)
    os.read(read_end, 1)
    (folder,) = tmp_path.iterdir()
    assert clean_leftovers(tmp_path) == []
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert clean_leftovers(tmp_path) == [folder]
    assert names(tmp_path) == []


def in_a_process(fn: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        failed = True
        try:
            fn()
            failed = False
        finally:
            traceback.print_exc()
            os._exit(failed)
    return pid


def test_savers_that_share_a_folder_do_not_disturb_each_other(tmp_path: Path) -> None:
    def fn(name: str) -> None:
        for number in range(150):
            clean_leftovers(tmp_path)
            publish(tmp_path / name, str(number))

    pids = [in_a_process(lambda name=name: fn(name)) for name in ("a", "b", "c", "c")]
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0, 0, 0]
    assert names(tmp_path) == ["a", "b", "c"]


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EBADF])
def test_a_file_system_without_locks_keeps_what_is_young(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(fd: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    publish(tmp_path / "c", "one")
    leftover = hidden_name(tmp_path / "d", "tmp")
    leftover.mkdir()
    assert clean_leftovers(tmp_path) == []
    os.utime(leftover, (0, 0))
    assert clean_leftovers(tmp_path) == [leftover]
    fill(hidden_name(tmp_path / "e", "old"), "stepped aside")  # a checkpoint, whatever its age
    clean_leftovers(tmp_path)
    assert names(tmp_path) == ["c", "e"]


def test_what_another_user_left_or_holds_does_not_stop_a_save() -> None:
    if os.getuid() != 0:
        pytest.skip("only root can become another user")

    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are closed to others
        shared = Path(name)
        shared.chmod(0o777)
        theirs = hidden_name(shared / "d", "tmp")
        theirs.mkdir(mode=0o700)

        def fn() -> None:
            os.setgid(65534)
            os.setuid(65534)
            if clean_leftovers(shared):
                raise AssertionError("said to have removed what it may not remove")
            publish(shared / "c", "one")

        assert os.waitpid(in_a_process(fn), 0)[1] == 0
        assert names(shared) == sorted([theirs.name, "c"])


def test_what_came_under_the_name_during_a_save_is_not_removed(tmp_path: Path) -> None:
    staging = Staging.make(tmp_path / "c")
    fill(staging.folder, "one")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "thesis.tex").write_text("x")
    with pytest.raises(ValueError, match="is not a checkpoint that may be replaced"):
        staging.publish()
    staging.close()
    assert names(tmp_path) == ["c"] and names(tmp_path / "c") == ["thesis.tex"]


def test_a_name_too_long_for_its_hidden_one_is_refused_with_the_limit(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has 230 bytes; choose .* at most 220, since"):
        Staging.make(tmp_path / ("ü" * 115))
    assert names(tmp_path) == []
    publish(tmp_path / ("x" * 220), "one")


def test_new_folders_follow_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        publish(tmp_path / "a" / "c", "x")
    finally:
        os.umask(old)
    assert (tmp_path / "a" / "c").stat().st_mode & 0o777 == 0o750
