"""The checks that every package's tests/test_package.py calls, each shown to fail on a fault."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from package_facts import (
    Wrong,
    check_import_is_cheap,
    check_name_table,
    check_names,
    check_tour,
    check_wrong_types,
    run_examples,
)

FACE = '''
"""A package."""
__all__ = ["SampleError", "save"]

class SampleError(Exception):
    """What goes wrong."""

class SampleTypeError(SampleError, TypeError):
    """An argument of a wrong type."""

def save(path):
    """Write it."""
    if not isinstance(path, str):
        raise SampleTypeError(f"path is {path}; give a str")

def __getattr__(name):
    raise AttributeError(f"module {__name__} has no attribute {name}")
'''

Make = Callable[..., ModuleType]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Import the package `sample` with this text for its face and empty rooms of these names."""
    monkeypatch.syspath_prepend(tmp_path)

    def write_and_import(face: str = FACE, rooms: tuple[str, ...] = ()) -> ModuleType:
        for room in ("", *rooms):
            (tmp_path / "sample" / room).mkdir(parents=True, exist_ok=True)
            (tmp_path / "sample" / room / "__init__.py").write_text("")
        (tmp_path / "sample" / "__init__.py").write_text(face)
        sys.modules.pop("sample", None)
        importlib.invalidate_caches()
        return importlib.import_module("sample")

    yield write_and_import
    sys.modules.pop("sample", None)


def with_save(body: str) -> str:
    """The face whose `save` has this body."""
    return FACE.replace('raise SampleTypeError(f"path is {path}; give a str")', body)


def page(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "README.md"
    file.write_text(text)
    return file


def test_a_good_face_is_accepted(make: Make) -> None:
    package = make()
    check_names(package)
    assert check_wrong_types(package, package.SampleError) == 1


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('["SampleError", "save"]', "[]", "no public names"),
        ('"""Write it."""', "", r"without docstring: \['save'\]"),
        ("def __getattr__(name):\n    raise", "def __getattr__(name): return name\n#", "no error"),
        ("module {__name__} has no", "there is no", "does not say which package"),
    ],
)
def test_a_wrong_face_is_found(make: Make, old: str, new: str, message: str) -> None:
    assert old in FACE
    with pytest.raises(AssertionError, match=message):
        check_names(make(FACE.replace(old, new)))


def test_a_name_that_does_not_resolve_is_found(make: Make) -> None:
    with pytest.raises(AttributeError, match="has no attribute load"):
        check_names(make(FACE.replace('"save"]', '"save", "load"]')))


def test_an_import_that_is_not_cheap_is_found(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    package = make()
    check_import_is_cheap(package, "torch", "sqlite3")
    package = make(FACE + "\nimport sqlite3\n")
    with pytest.raises(AssertionError, match=r"import sample imports \['sqlite3'\]"):
        check_import_is_cheap(package, "torch", "sqlite3")


def test_examples_are_run_and_counted(tmp_path: Path) -> None:
    text = (
        "```python\nx = 1\n```\n\n```bash\nfalse\n```\n\n```python\nassert 'x' not in dir()\n```\n"
    )
    assert run_examples(page(tmp_path, text)) == 2


def test_an_example_that_fails_and_a_page_without_one_are_found(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        run_examples(page(tmp_path, "```python\n1 / 0\n```\n"))
    with pytest.raises(AssertionError, match="has no example"):
        run_examples(page(tmp_path, "```bash\ntrue\n```\n"))


def test_an_example_that_is_a_program_runs_as_one(tmp_path: Path) -> None:
    text = "```python\nif __name__ == '__main__':\n    {}\n```\n"
    assert run_examples(page(tmp_path, text.format("x = 1"))) == 1
    with pytest.raises(AssertionError, match=r"(?s)an example of .* fails:.*ZeroDivisionError"):
        run_examples(page(tmp_path, text.format("1 / 0")))


def test_examples_can_be_told_from_blocks_that_only_show(tmp_path: Path) -> None:
    text = "```python\nshown(...)\n```\n\n```python\n# example: a router\nx = 1\n```\n"
    assert run_examples(page(tmp_path, text), beginning="# example") == 1
    with pytest.raises(AssertionError, match="has no example that begins with '# other'"):
        run_examples(page(tmp_path, text), beginning="# other")


@pytest.mark.parametrize(
    ("tour", "message"),
    [
        ("- `router/` - who\n- `layer/` - what\n", ""),
        ("- `router/` - who\n", "'layer/': 0"),
        ("- `router/` - who\n- `layer/` - what\n- `layer/` - again\n", "'layer/': 2"),
        ("- `router/` - who\n- `layer/` - what\n- `old/` - gone\n", r"not there: \['old/'\]"),
    ],
)
def test_the_tour_has_one_line_for_each_room(
    make: Make, tmp_path: Path, tour: str, message: str
) -> None:
    package = make(rooms=("router", "layer"))
    if not message:
        check_tour(package, page(tmp_path, tour))
        return
    with pytest.raises(AssertionError, match=message):
        check_tour(package, page(tmp_path, tour))


def test_a_package_without_rooms_has_a_line_for_each_file(make: Make, tmp_path: Path) -> None:
    package = make()
    (tmp_path / "sample" / "plan.py").write_text("")
    (tmp_path / "sample" / "_private.py").write_text("")
    check_tour(package, page(tmp_path, "- `plan.py` - what is done\n"))
    with pytest.raises(AssertionError, match=r"plan\.py"):
        check_tour(package, page(tmp_path, "nothing\n"))


TABLE = "| name | what it does |\n|---|---|\n| `save(path)` | writes |\n| `SampleError` | fails |\n"


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (TABLE, ""),
        (TABLE.replace("| `save(path)` | writes |\n", ""), r"missing \['save'\]"),
        (TABLE.replace("`save(path)`", "`save`, `load`"), r"unknown \['load'\]"),
        (TABLE + "| `save` | again |\n", r"missing \[\], unknown \[\]"),
        (TABLE.replace("name", "word"), "no table"),
    ],
)
def test_the_table_of_names_is_complete(
    make: Make, tmp_path: Path, table: str, message: str
) -> None:
    package = make()
    if not message:
        check_name_table(package, page(tmp_path, table))
        return
    with pytest.raises(AssertionError, match=message):
        check_name_table(package, page(tmp_path, table))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("pass", "save: accepted"),
        ("raise TypeError('not a str')", "save: TypeError, not a SampleError"),
        ("path.parent", "save: AttributeError, not a SampleError"),
        ("raise SampleError('not a str')", "SampleError is no TypeError or ValueError"),
        ("raise SampleTypeError()", "SampleTypeError without a message"),
    ],
)
def test_a_wrong_type_that_is_not_refused_well_is_found(
    make: Make, body: str, message: str
) -> None:
    package = make(with_save(body))
    with pytest.raises(AssertionError, match=message):
        check_wrong_types(package, package.SampleError)


def test_given_arguments_reach_the_wrong_one(make: Make) -> None:
    face = FACE.replace("def save(path)", "def save(step, *, path='x')")
    face = face.replace("if not", "if type(step) is not int: raise TypeError(step)\n    if not")
    package = make(face)
    with pytest.raises(AssertionError, match="save: TypeError, not a"):
        check_wrong_types(package, package.SampleError)
    with pytest.raises(AssertionError, match="takes no argument that could be wrong"):
        check_wrong_types(package, package.SampleError, given={"save": {"step": 1}})
    given = {"save": {"step": 1, "path": Wrong()}}
    assert check_wrong_types(package, package.SampleError, given=given) == 1


def test_names_and_arguments_that_do_not_exist_are_found(make: Make) -> None:
    package = make()
    for wrong in ({"given": {"load": {}}}, {"not_called": ["load"]}):
        with pytest.raises(AssertionError, match=r"not public: \['load'\]"):
            check_wrong_types(package, package.SampleError, **wrong)
    with pytest.raises(AssertionError, match=r"has no parameters \['step'\], which are given"):
        check_wrong_types(package, package.SampleError, given={"save": {"step": 1}})


def test_what_takes_nothing_is_left_out(make: Make) -> None:
    package = make(with_save("pass"))
    assert check_wrong_types(package, package.SampleError, not_called=["save"]) == 0
