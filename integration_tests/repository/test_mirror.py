from pathlib import Path

import pytest

from gates.mirror import check_mirror
from gates.source import as_text
from workspace import Package


def found(root: Path, test: str) -> str:
    folder = root / "packages" / "a-b"
    for name in ("src/a_b/room/__init__.py", "src/a_b/room/step.py", "src/a_b/cli.py", test):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    package = Package(name="a-b", version="0.1.0", folder=folder, siblings=())
    return as_text(check_mirror([package], root=root))


@pytest.mark.parametrize(
    "test",
    [
        "room/test_step.py",
        "room/test_step_on_gpu.py",
        "test_kills.py",
        "conftest.py",
        "room/help.py",
    ],
)
def test_tests_in_the_room_of_what_they_test_have_no_problem(tmp_path: Path, test: str) -> None:
    assert found(tmp_path, f"tests/{test}") == ""


@pytest.mark.parametrize(
    ("test", "message"),
    [
        ("attic/test_step.py", "tests of attic/, which is no room"),
        ("room/sub/test_step.py", "tests of room/sub/, which is no room"),
        ("room/test_steps.py", "no file steps.py in the room room/"),
        ("room/test_cli.py", "no file cli.py in the room room/"),
    ],
)
def test_tests_that_were_not_moved_along_are_found(tmp_path: Path, test: str, message: str) -> None:
    report = found(tmp_path, f"tests/{test}")
    assert f"packages/a-b/tests/{test}:1: {message}" in report
