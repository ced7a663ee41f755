import errno
import os
from pathlib import Path

import pytest

from weight_convert.errors import CorruptFileError
from weight_convert.staging.copying import OpenFiles, Pipe, copy_buffered


def opened(source: Path, target: Path) -> tuple[int, int]:
    return os.open(source, os.O_RDONLY), os.open(target, os.O_WRONLY | os.O_CREAT)


@pytest.mark.parametrize("refused", ["nothing", "file to pipe", "pipe to file", "no splice"])
def test_a_range_is_appended_at_the_position_of_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    splice = os.splice

    def some(a: int, b: int, count: int, offset_src: int | None = None) -> int:
        if (refused == "file to pipe") == (offset_src is not None):
            raise OSError(errno.EINVAL, "as file systems answer that cannot splice")
        return splice(a, b, count, offset_src=offset_src)

    if refused == "no splice":  # as on macOS
        monkeypatch.delattr(os, "splice")
    elif refused != "nothing":
        monkeypatch.setattr(os, "splice", some)
    content = os.urandom(1_700_001)
    (tmp_path / "a").write_bytes(content)
    a, b = opened(tmp_path / "a", tmp_path / "b")
    os.write(b, b"head")
    with Pipe() as pipe:
        pipe.copy(a, b, offset=3, size_bytes=1_600_000, name="a")
        pipe.copy(a, b, offset=0, size_bytes=0, name="a")
        pipe.copy(a, b, offset=1_700_000, size_bytes=1, name="a")
    os.close(a)
    os.close(b)
    assert (tmp_path / "b").read_bytes() == b"head" + content[3:1_600_003] + content[-1:]


def test_a_source_that_ends_early_is_an_error_not_a_short_copy(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    a, b = opened(tmp_path / "a", tmp_path / "b")
    with Pipe() as pipe, pytest.raises(CorruptFileError, match=r"byte 3 .* expected 2 more"):
        pipe.copy(a, b, offset=1, size_bytes=4, name="a")
    os.close(a)
    os.close(b)


def test_other_failures_of_the_system_pass_through(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    a = os.open(tmp_path / "a", os.O_RDONLY)
    full = os.open("/dev/full", os.O_WRONLY)
    with pytest.raises(OSError, match="No space left"):
        copy_buffered(a, full, offset=0, size_bytes=3)
    for target, message in ((full, "No space left"), (a, "Bad file descriptor")):
        with Pipe() as pipe, pytest.raises(OSError, match=message):
            pipe.copy(a, target, offset=0, size_bytes=3, name="a")
    os.close(a)
    os.close(full)


def test_only_the_last_used_files_stay_open(tmp_path: Path) -> None:
    paths = [tmp_path / str(number) for number in range(10)]
    for path in paths:
        path.write_bytes(path.name.encode())
    before = len(os.listdir("/proc/self/fd"))
    with OpenFiles(paths, max_open=3) as files:
        for number in [0, 1, 2, 0, 3, 4, 9, 0, 9, 5, 0]:
            assert os.pread(files.fd(number), 1, 0) == str(number).encode()
            assert len(os.listdir("/proc/self/fd")) <= before + 3
        assert files.fd(9) == files.fd(9)
    assert len(os.listdir("/proc/self/fd")) == before
