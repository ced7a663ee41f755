from pathlib import Path

import pytest

from gates.lines import LINES, LINES_BEFORE, check_lines
from gates.source import as_text
from workspace import Package, read_packages


def package(root: Path, name: str, *, py: int, pyi: int = 0) -> Package:
    folder = root / "packages" / name
    source = folder / "src" / name
    source.mkdir(parents=True)
    (source / "m.py").write_text("x = 1\n" * py)
    (source / "m.pyi").write_text("x: int\n" * pyi)
    (source / "m.pyc").write_bytes(b"\n\xff")
    return Package(name=name, version="0.1.0", folder=folder, siblings=())


@pytest.mark.parametrize(("pyi", "bad"), [(2, False), (3, True)])
def test_packages_together_have_no_more_lines_than_before(
    tmp_path: Path, pyi: int, bad: bool
) -> None:
    packages = [package(tmp_path, "a", py=10, pyi=pyi), package(tmp_path, "b", py=8)]
    report = as_text(check_lines(packages, root=tmp_path, before={"a": 10, "b": 10}))
    assert ("packages/a/src:1: 13 lines of .py and .pyi, 10 allowed" in report) is bad
    assert "packages/b" not in report


def test_a_package_without_a_figure_has_none_to_use(tmp_path: Path) -> None:
    packages = [package(tmp_path, "a", py=10), package(tmp_path, "new", py=1)]
    assert "packages/new/src" in as_text(check_lines(packages, root=tmp_path, before={"a": 10}))


def test_the_table_names_every_package() -> None:
    assert sorted(LINES_BEFORE) == sorted(p.name for p in read_packages())
    assert LINES == 58_563
