import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from unified_ckpt.errors import CorruptCheckpointError, LoadError, StoreError
from unified_ckpt.files import OpenFolder
from unified_ckpt.files.opened import read_error


@contextmanager
def without_privileges() -> Iterator[Path]:
    """A folder, and this process without the right to read everything that root has."""
    with tempfile.TemporaryDirectory(prefix="unified-ckpt-") as name:
        os.chmod(name, 0o755)
        before = os.geteuid()
        yield Path(name)
        if os.geteuid() != before:
            os.seteuid(before)


def test_what_is_read_is_of_one_folder_whatever_its_name_shows(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").write_bytes(b"old")
    with OpenFolder(tmp_path / "a") as folder:
        assert folder.leads_here() and folder.read("x") == b"old"
        (tmp_path / "a").rename(tmp_path / "b")
        assert not folder.leads_here()
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "x").write_bytes(b"new")
        assert folder.read("x") == b"old" and not folder.leads_here()
        (tmp_path / "b" / "x").unlink()
        assert folder.size("x") is None and folder.changed_file() is None
        with pytest.raises(CorruptCheckpointError, match=r"a/x: file is missing"):
            folder.read("x")


def test_a_file_that_was_read_and_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"old")
    (tmp_path / "y").write_bytes(b"old")
    with OpenFolder(tmp_path) as folder:
        assert folder.read("x") == b"old"
        (tmp_path / "y").write_bytes(b"longer")
        assert folder.changed_file() is None  # nobody has read it
        (tmp_path / "x").write_bytes(b"longer")
        assert folder.changed_file() == "x"


def test_names_are_those_of_regular_files_also_below(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").touch()
    (tmp_path / "link").symlink_to(tmp_path / "a" / "x")
    os.mkfifo(tmp_path / "fifo")
    with OpenFolder(tmp_path) as folder:
        assert folder.names() == {"a/x", "link"}
        assert sorted(folder.listed()) == ["a", "fifo", "link"]


def test_what_is_no_file_is_named_and_stops_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    with OpenFolder(tmp_path) as folder:
        for name, said in {
            "fifo": "is not a regular file",
            "folder": "is not a regular file",
            "loop": "cannot be read: Too many levels of symbolic links",
            "nothing": "file is missing",
            "fifo/x": "file is missing",
        }.items():
            with pytest.raises(CorruptCheckpointError, match=f"{name}: {said}"):
                folder.read(name)
    with pytest.raises(CorruptCheckpointError, match="loop: cannot be read: Too many levels"):
        OpenFolder(tmp_path / "loop")
    for name in ("nothing", "fifo", "x" * 3, "fifo/x"):
        with pytest.raises(LoadError, match="no such checkpoint directory"):
            OpenFolder(tmp_path / name)


def test_a_file_that_this_user_may_not_read_counts_as_damage() -> None:
    with without_privileges() as place:
        (place / "x").write_bytes(b"secret")
        os.chmod(place / "x", 0)
        if os.geteuid() == 0:
            os.seteuid(65534)
        with (
            OpenFolder(place) as folder,
            pytest.raises(CorruptCheckpointError, match="x: cannot be read: Permission denied"),
        ):
            folder.read("x")


def test_an_error_of_the_disk_counts_as_damage_and_a_lack_of_descriptors_does_not(
    tmp_path: Path,
) -> None:
    (tmp_path / "x").touch()
    with (
        OpenFolder(tmp_path) as folder,
        pytest.raises(CorruptCheckpointError, match="x: cannot be read: Input/output error"),
        folder.open("x"),
    ):
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    full = read_error(tmp_path, OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
    assert type(full) is StoreError and "raise the limit of this process" in str(full)


def test_a_folder_gives_its_descriptor_back_also_when_nobody_closes_it(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        OpenFolder(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before
