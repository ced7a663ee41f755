from pathlib import Path

import pytest

import package_facts
from gates.pages import FACTS, check_pages
from gates.source import as_text
from workspace import Package

QUESTION = (
    "- Who decides the order? -> [a-b](../packages/a-b/README.md) -> "
    "[{label}](../packages/a-b/src/a_b/{place})"
)


@pytest.fixture
def package(tmp_path: Path) -> Package:
    """A package with a room, pages, and one more file at its root."""
    folder = tmp_path / "packages" / "a-b"
    room = folder / "src" / "a_b" / "order"
    room.mkdir(parents=True)
    (room / "sums.py").write_text("LIMIT = 3\nclass Sum:\n    size: int\n    def add(self): ...\n")
    (room.parent / "errors.py").write_text("class E(Exception): ...\n")
    (folder / "README.md").write_text("# a-b\n\n## The tour\n\n- `order/` - sums, errors.py\n")
    (folder / "ARCHITECTURE.md").write_text("# Floors\n")
    (tmp_path / "docs").mkdir()
    (folder / "tests").mkdir()
    (folder / "tests" / "test_package.py").write_text("".join(f"{fact}(a_b)\n" for fact in FACTS))
    return Package(name="a-b", version="0.1.0", folder=folder, siblings=())


def found(package: Package, line: str, *, count: int = 30) -> str:
    root = package.folder.parents[1]
    (root / "docs" / "where-is.md").write_text("# Where is\n\n" + f"{line}\n" * count)
    return as_text(check_pages([package], root=root))


@pytest.mark.parametrize(
    ("label", "place"),
    [
        ("`Sum.add`", "order/sums.py"),
        ("`Sum`, `LIMIT`", "order/sums.py#Sum.size"),
        ("the room", "order"),
        ("`Sum`", "order/"),
        ("`sums.py`", "order/sums.py"),
        ("`E`", "errors.py"),
    ],
)
def test_a_question_of_two_hops_has_no_problem(package: Package, label: str, place: str) -> None:
    assert found(package, QUESTION.format(label=label, place=place)) == ""


def test_a_question_may_go_on_in_the_next_line(package: Package) -> None:
    line = QUESTION.format(label="`Sum`", place="order/sums.py")
    assert found(package, line.replace("-> [`Sum`", "->\n  [`Sum`")) == ""


@pytest.mark.parametrize(
    ("label", "place", "message"),
    [
        ("`Sums`", "order/sums.py", "`Sums` is not defined in packages/a-b/src/a_b/order/sums.py"),
        ("`Sum.take`", "order/sums.py", "`Sum.take` is not defined"),
        ("sums", "order/sums.py#TOP", "`TOP` is not defined"),
        ("`Other`", "order", "`Other` is not defined"),
        ("sums", "order/sum.py", "order/sum.py does not exist"),
    ],
)
def test_a_place_that_is_not_there_is_found(
    package: Package, label: str, place: str, message: str
) -> None:
    assert message in found(package, QUESTION.format(label=label, place=place))


@pytest.mark.parametrize(
    "line",
    [
        "- Who? -> [a-b](../packages/a-b/README.md)",
        "- Who -> [a-b](../packages/a-b/README.md) -> [room](../packages/a-b/src/a_b/order)",
        QUESTION.format(label="a", place="order") + " -> [b](../packages/a-b/src/a_b/order)",
    ],
)
def test_another_number_of_hops_is_found(package: Package, line: str) -> None:
    assert "where-is.md:3: write `- <question>? -> [package]" in found(package, line)


def test_29_questions_are_too_few(package: Package) -> None:
    line = QUESTION.format(label="room", place="order")
    assert "29 questions; at least 30" in found(package, line, count=29)


def test_the_first_hop_is_a_page_that_names_the_room(package: Package) -> None:
    line = QUESTION.format(label="room", place="order")
    assert "is no page" in found(package, line.replace("README.md", "src/a_b/errors.py"))
    (package.folder / "README.md").write_text("# a-b\n")
    assert "README.md does not name `order/`" in found(package, line)


def test_the_second_hop_lies_in_the_package_of_the_first(package: Package) -> None:
    root = package.folder.parents[1]
    other = Package(name="c", version="0.1.0", folder=root / "packages" / "c", siblings=())
    (other.folder / "src" / "c" / "order").mkdir(parents=True)
    line = QUESTION.format(label="room", place="order").replace("a-b/src/a_b", "c/src/c")
    found(package, line)
    report = as_text(check_pages([package, other], root=root))
    assert "[room] lies in another package than [a-b]" in report


def test_a_heading_of_a_page_is_a_place(package: Package) -> None:
    line = QUESTION.format(label="tour", place="../../README.md#the-tour")
    (package.folder / "ARCHITECTURE.md").write_text("see README.md\n")
    line = line.replace("b/README.md) ->", "b/ARCHITECTURE.md) ->")
    assert found(package, line) == ""
    assert "`the-way` is not defined" in found(package, line.replace("the-tour", "the-way"))


@pytest.mark.parametrize(("lines", "bad"), [(0, True), (60, False), (61, True)])
def test_an_architecture_page_has_60_lines_at_most(package: Package, lines: int, bad: bool) -> None:
    (package.folder / "ARCHITECTURE.md").write_text("x\n" * lines)
    report = found(package, QUESTION.format(label="room", place="order"))
    assert ("packages/a-b/ARCHITECTURE.md:1" in report) is bad


@pytest.mark.parametrize("fact", FACTS)
def test_tests_that_leave_out_a_shared_check_are_found(package: Package, fact: str) -> None:
    tests = package.folder / "tests" / "test_package.py"
    tests.write_text(tests.read_text().replace(f"{fact}(", "print("))
    report = found(package, QUESTION.format(label="room", place="order"))
    assert f"tests/test_package.py:1: does not call {fact} of" in report


def test_the_shared_checks_exist() -> None:
    assert all(callable(getattr(package_facts, fact)) for fact in FACTS)
