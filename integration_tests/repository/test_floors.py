from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gates.floors import check_floors
from gates.source import Source, as_text
from workspace import Package

Parse = Callable[[dict[str, str]], list[Source]]

PACKAGE = Package(name="a-b", version="0.1.0", folder=Path("packages/a-b"), siblings=())
ROOMS = {
    "a_b/__init__.py": "",
    "a_b/errors.py": "",
    "a_b/top/__init__.py": "",
    "a_b/top/sub/__init__.py": "",
    "a_b/base/__init__.py": "",
}
GOOD: dict[str, Any] = {
    "name": "Rooms of a_b",
    "type": "layers",
    "containers": ["a_b"],
    "layers": ["top", "base"],
}


def found(parse: Parse, *contracts: dict[str, Any], files: dict[str, str] | None = None) -> str:
    settings = {"tool": {"importlinter": {"contracts": list(contracts)}}}
    return as_text(
        check_floors([PACKAGE], parse(ROOMS if files is None else files), settings=settings)
    )


@pytest.mark.parametrize(
    "layers", [["top", "base"], ["top | base"], ["(top) : base"], ["top", "base", "errors"]]
)
def test_a_contract_that_lists_every_room_has_no_problem(parse: Parse, layers: list[str]) -> None:
    assert found(parse, {"name": "Layers", "type": "layers"}, GOOD | {"layers": layers}) == ""


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (["top"], "does not list `base`; put it on its floor (packages/a-b/)"),
        (["top", "base", "attic"], "lists `attic`, which is not there"),
        (["top", "base | top"], "lists `top` twice"),
    ],
)
def test_a_room_outside_of_the_floors_is_found(
    parse: Parse, layers: list[str], message: str
) -> None:
    assert message in found(parse, GOOD | {"layers": layers})


@pytest.mark.parametrize(
    "contracts", [[], [GOOD, GOOD], [GOOD | {"type": "forbidden"}], [GOOD | {"name": "Floors"}]]
)
def test_a_package_without_its_one_contract_is_found(
    parse: Parse, contracts: list[dict[str, Any]]
) -> None:
    assert 'write exactly one, name = "Rooms of a_b"' in found(parse, *contracts)


def test_a_missing_contract_is_told_what_the_imports_of_today_would_allow(parse: Parse) -> None:
    files = {
        **ROOMS,
        "a_b/top/job.py": "from a_b.base import x\nfrom a_b.errors import E\n",
        "a_b/side/__init__.py": "",
    }
    assert 'such as layers = ["top", "base | side"]' in found(parse, files=files)
    circle = {**files, "a_b/base/wire.py": "from a_b.top import y\n"}
    assert "once the circles are gone" in found(parse, files=circle)


def test_a_contract_without_exceptions_is_asked_for(parse: Parse) -> None:
    assert "ignores imports" in found(parse, GOOD | {"ignore_imports": ["a_b.base -> a_b.top"]})


def test_a_package_without_rooms_lists_its_files(parse: Parse) -> None:
    files = {"a_b/__init__.py": "", "a_b/plan.py": "", "a_b/errors.py": ""}
    good = GOOD | {"name": "Files of a_b", "layers": ["plan", "errors"]}
    assert found(parse, good, files=files) == ""
    assert "does not list `plan`" in found(parse, good | {"layers": ["errors"]}, files=files)
