import zipfile
from email.message import Message
from pathlib import Path

import pytest

from gates.source import as_text
from gates.wheels import check_wheels, sibling_messages
from workspace import Package, read_packages

PACKAGE = Package(name="a-b", version="0.1.0", folder=Path(), siblings=())


def found(folder: Path, files: dict[str, str]) -> str:
    with zipfile.ZipFile(folder / "a_b-0.1.0-py3-none-any.whl", "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return as_text(check_wheels(folder, [PACKAGE], versions={"a-b": "0.1.0", "other": "0.1.3"}))


def metadata(*requirements: str) -> Message:
    message = Message()
    for requirement in requirements:
        message["Requires-Dist"] = requirement
    return message


def test_a_good_wheel_has_no_problem(tmp_path: Path, good_wheel: dict[str, str]) -> None:
    assert found(tmp_path, good_wheel) == ""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a_b-0.1.0.dist-info/entry_points.txt": ""}, "no command a-b"),
        ({"a_b-0.1.0.dist-info/METADATA": "Name: a-b\n"}, "License-Expression"),
        ({"tests/test_x.py": ""}, "files outside a_b/: tests/test_x.py"),
        (
            {"a_b-0.1.0.dist-info/METADATA": "License-Expression: MIT\nRequires-Dist: other\n"},
            "`other` needs a floor and a ceiling",
        ),
    ],
)
def test_a_bad_wheel_is_found(
    tmp_path: Path, good_wheel: dict[str, str], change: dict[str, str], message: str
) -> None:
    assert message in found(tmp_path, good_wheel | change)


def test_a_wheel_without_py_typed_is_found(tmp_path: Path, good_wheel: dict[str, str]) -> None:
    del good_wheel["a_b/py.typed"]
    assert "py.typed is missing" in found(tmp_path, good_wheel)


def test_a_missing_wheel_is_found(tmp_path: Path) -> None:
    assert "0 wheels match" in as_text(check_wheels(tmp_path, [PACKAGE], versions={}))


@pytest.mark.parametrize(
    ("bounds", "good"),
    [
        (">=0.1,<0.2", True),
        ("<0.2,>=0.1.3", True),
        ("", False),
        (">=0.1", False),
        ("<0.2", False),
        (">=0.2,<0.3", False),
        (">=0.1,<0.1.3", False),
        (">=0.1,<=0.2", False),
    ],
)
def test_bounds_on_a_sibling_hold_its_present_version(bounds: str, good: bool) -> None:
    found = sibling_messages(metadata(f"other{bounds}", "torch>=2.11"), {"other": "0.1.3"})
    assert (found == []) is good, found


def test_the_workspace_knows_who_depends_on_whom() -> None:
    siblings = {p.name: p.siblings for p in read_packages()}
    assert siblings["moe-pipeline"] == ("comm-collectives",)
    assert len(siblings["moe-train"]) == 6
    assert not siblings["mesh-spmd"]
