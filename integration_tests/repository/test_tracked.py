import subprocess
from pathlib import Path

import pytest

from gates.tracked import check_tracked, tracked_files
from workspace import ROOT


@pytest.mark.parametrize(
    "parts",
    [
        ("https://", "pypi", ".org/simple"),
        ("https://files.", "pythonhosted", ".org/x"),
        ("--index", "-url https://mirror"),
        ("see ", "/root", "/notes.txt"),
        ('open("', "/home", '/ann/data")'),
        ("cd ", "/tmp", "/run1"),
    ],
)
def test_an_index_host_or_a_machine_path_is_found(tmp_path: Path, parts: tuple[str, ...]) -> None:
    file = tmp_path / "a.txt"
    file.write_text("first line\n" + "".join(parts) + "\n")
    (problem,) = check_tracked([file], root=tmp_path)
    assert (problem.path, problem.line) == ("a.txt", 2)


@pytest.mark.parametrize(
    "text",
    ["a/work/b", "../tmp/x", "https://example.org/home/x", "$HOME/x", "this / that"],
)
def test_other_text_is_left_alone(tmp_path: Path, text: str) -> None:
    file = tmp_path / "a.txt"
    file.write_text(text)
    assert not check_tracked([file], root=tmp_path)


def test_binary_files_are_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "a.bin"
    file.write_bytes(b"\xff\xfe/root/x")
    assert not check_tracked([file], root=tmp_path)


def test_only_tracked_files_count_and_the_lock_does_not(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    for name in ("a.txt", "uv.lock", "untracked.txt"):
        (tmp_path / name).write_text("x")
    subprocess.run(["git", "add", "a.txt", "uv.lock"], cwd=tmp_path, check=True)
    assert tracked_files(tmp_path) == [tmp_path / "a.txt"]
    assert ROOT / "pyproject.toml" in tracked_files(ROOT)
