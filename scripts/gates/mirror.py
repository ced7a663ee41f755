"""Tests stand in folders named as rooms: `tests/<room>/test_<file>.py` is of `<room>/<file>.py`.

Tests of a whole package stand beside these folders, at `tests/test_*.py`. One file may have several
files of tests: `test_step.py` and `test_step_on_gpu.py` both are of `step.py`.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from gates.source import Problem
from workspace import Package


def check_mirror(packages: Sequence[Package], *, root: Path) -> list[Problem]:
    """Files of tests in a folder that is no room, or without the file that they test."""
    return [problem for package in packages for problem in _of_package(package, root)]


def _of_package(package: Package, root: Path) -> Iterator[Problem]:
    tests, source = package.folder / "tests", package.folder / "src" / package.import_name
    for file in sorted(tests.rglob("test_*.py")):
        room = file.parent.relative_to(tests)
        if room == Path():
            continue
        tested = file.stem.removeprefix("test_")
        if not (source / room / "__init__.py").is_file():
            message = f"tests of {room.as_posix()}/, which is no room; move them along"
        elif not any(_is_of(tested, f.stem) for f in (source / room).glob("*.py")):
            message = (
                f"no file {tested}.py in the room {room.as_posix()}/; name the tests after "
                "the file that they test, or move tests of the whole package to tests/"
            )
        else:
            continue
        yield Problem(path=file.relative_to(root).as_posix(), line=1, message=message)


def _is_of(tested: str, file: str) -> bool:
    return tested == file or tested.startswith(f"{file}_")
