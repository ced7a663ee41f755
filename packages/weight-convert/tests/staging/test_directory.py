import os
import subprocess
import sys
from pathlib import Path

import pytest

from weight_convert.errors import TargetExistsError
from weight_convert.staging.directory import staged_directory


def test_the_directory_appears_complete_and_with_its_parents(tmp_path: Path) -> None:
    target = tmp_path / "a" / "b" / "out"
    with staged_directory(target) as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "file").write_text("x")
        assert not target.exists()
    assert (target / "sub" / "file").read_text() == "x"
    assert os.listdir(target.parent) == ["out"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_nothing_is_left_after_an_exception(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), staged_directory(tmp_path / "out") as folder:
        (folder / "file").write_text("x")
        raise error
    assert os.listdir(tmp_path) == []


def test_an_existing_target_is_refused_and_untouched(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("file", "folder", "link"):
        with (
            pytest.raises(TargetExistsError, match="choose another target"),
            staged_directory(tmp_path / name),
        ):
            pass
    assert sorted(os.listdir(tmp_path)) == ["file", "folder", "link"]
    assert (tmp_path / "file").read_text() == "x"


def test_a_target_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with (
        pytest.raises(TargetExistsError, match="exists"),
        staged_directory(target) as folder,
    ):
        (folder / "mine").touch()
        target.mkdir()
        (target / "theirs").touch()
    assert os.listdir(tmp_path) == ["out"]
    assert os.listdir(target) == ["theirs"]


def test_two_writers_of_one_target_exclude_each_other(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with staged_directory(target) as folder:
        (folder / "first").touch()
        code = (
            "import sys; from pathlib import Path\n"
            "from weight_convert.staging.directory import staged_directory\n"
            "with staged_directory(Path(sys.argv[1])): pass"
        )
        other = subprocess.run(
            [sys.executable, "-c", code, str(target)], capture_output=True, text=True, timeout=60
        )
        assert "another process is writing" in other.stderr
        assert other.returncode == 1
    assert os.listdir(target) == ["first"]


def test_the_rest_of_a_killed_writer_is_removed(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from weight_convert.staging.directory import staged_directory\n"
        "with staged_directory(Path(sys.argv[1])) as folder:\n"
        "    (folder / 'sub').mkdir()\n"
        "    (folder / 'sub' / 'rest').touch()\n"
        "    (folder / 'link').symlink_to('/')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)"
    )
    target = tmp_path / "out"
    killed = subprocess.run([sys.executable, "-c", code, str(target)], timeout=60)
    assert killed.returncode == -9
    assert os.listdir(tmp_path) == [".out.partial"]
    with staged_directory(target) as folder:
        assert os.listdir(folder) == []
    assert os.listdir(tmp_path) == ["out"]
