from pathlib import Path
from zipfile import ZipFile

import pytest

from release import release_messages, tagged_package
from workspace import Package, read_packages


@pytest.fixture
def package(tmp_path: Path) -> Package:
    folder = tmp_path / "a-b"
    folder.mkdir()
    (folder / "CHANGELOG.md").write_text("# Changelog\n\n## 0.1.0 (2026-01-31)\n\n- First.\n")
    return Package(name="a-b", version="0.1.0", folder=folder, siblings=())


@pytest.fixture
def dist(tmp_path: Path, good_wheel: dict[str, str]) -> Path:
    folder = tmp_path / "dist"
    folder.mkdir()
    with ZipFile(folder / "a_b-0.1.0-py3-none-any.whl", "w") as archive:
        for name, text in good_wheel.items():
            archive.writestr(name, text)
    (folder / "a_b-0.1.0.tar.gz").write_bytes(b"")
    return folder


def test_a_release_in_which_all_agree_is_accepted(package: Package, dist: Path) -> None:
    assert release_messages("a-b-v0.1.0", dist, [package]) == []


def test_another_version_in_the_tag_is_refused(package: Package, dist: Path) -> None:
    report = "\n".join(release_messages("a-b-v0.2.0", dist, [package]))
    assert "says 0.2.0, pyproject.toml says 0.1.0" in report
    assert "no heading `## 0.2.0" in report


def test_an_unreleased_changelog_entry_is_refused(package: Package, dist: Path) -> None:
    (package.folder / "CHANGELOG.md").write_text("## 0.1.0 (unreleased)\n")
    assert "no heading" in "\n".join(release_messages("a-b-v0.1.0", dist, [package]))


def test_a_foreign_file_in_dist_is_refused(package: Package, dist: Path) -> None:
    (dist / "other-1.0-py3-none-any.whl").write_bytes(b"")
    assert "other files too" in "\n".join(release_messages("a-b-v0.1.0", dist, [package]))


@pytest.mark.parametrize("tag", ["v0.1.0", "mesh-spmd-0.1.0", "no-such-v0.1.0", "mesh-spmd-v"])
def test_a_tag_that_names_no_package_is_refused(tag: str) -> None:
    with pytest.raises(ValueError, match=r"names no package; write <package>-v<version>"):
        tagged_package(tag, read_packages())


def test_a_tag_names_one_package_and_version() -> None:
    package, version = tagged_package("mesh-spmd-v0.1.0", read_packages())
    assert (package.name, version) == ("mesh-spmd", "0.1.0")
