import os
import sysconfig
from pathlib import Path

import pytest

from moe_train.reading.corpus import Document, find_documents, name_hash


def write(path: Path, text: str = "text\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def names(found: list[Document]) -> list[str]:
    return [document.name for document in found]


def find(
    *corpus: object, extensions: tuple[str, ...] = (".py",), max_bytes: int | None = None
) -> list[str]:
    entries = [str(entry) for entry in corpus]
    return names(find_documents(entries, extensions=extensions, max_bytes=max_bytes))


def test_standard_library_is_found_without_installed_packages() -> None:
    documents = find_documents(["python_stdlib"], extensions=[".py"])
    found = set(names(documents))
    assert {"python_stdlib/json/decoder.py", "python_stdlib/os.py"} <= found
    assert not [n for n in found if "site-packages" in n or "__pycache__" in n]
    stdlib = os.path.realpath(sysconfig.get_paths()["stdlib"])
    assert sum(d.size_bytes for d in documents if str(d.path).startswith(stdlib)) > 5_000_000
    assert names(documents) == sorted(names(documents))


def test_folder_is_walked_by_extension_in_order_of_names(tmp_path: Path) -> None:
    for name in ("b/z.py", "b/a.py", "a.py", "c.txt", ".hidden/h.py", "b/__pycache__/p.py"):
        write(tmp_path / "top" / name)
    write(tmp_path / "top" / "empty.py", "")
    assert find(tmp_path / "top") == ["top/a.py", "top/b/a.py", "top/b/z.py"]
    assert find(tmp_path / "top", extensions=("*",)) == [
        "top/a.py",
        "top/b/a.py",
        "top/b/z.py",
        "top/c.txt",
    ]


def test_symbolic_links_are_not_followed_twice(tmp_path: Path) -> None:
    top = tmp_path / "top"
    write(top / "real" / "a.py")
    write(top / "real" / "b.py")
    outside = write(tmp_path / "outside" / "c.py")
    (top / "link").symlink_to(top / "real")
    (top / "loop").symlink_to(top)
    (top / "real" / "self").symlink_to(top / "real")
    (top / "copy.py").symlink_to(top / "real" / "a.py")
    (top / "far").symlink_to(outside.parent)
    (top / "broken.py").symlink_to(tmp_path / "nowhere.py")
    documents = find_documents([str(top)], extensions=[".py"])
    assert len({d.path for d in documents}) == len(documents) == 3
    assert {d.path for d in documents} == {
        top / "real" / "a.py",
        top / "real" / "b.py",
        outside,
    }


def test_entries_that_overlap_give_each_file_once(tmp_path: Path) -> None:
    write(tmp_path / "top" / "a.py")
    write(tmp_path / "top" / "sub" / "b.py")
    assert find(tmp_path / "top", tmp_path / "top" / "sub") == ["top/a.py", "top/sub/b.py"]
    assert find(tmp_path / "top" / "sub", tmp_path / "top") == ["sub/b.py", "top/a.py"]


def test_files_and_globs_are_taken_as_named(tmp_path: Path) -> None:
    write(tmp_path / "top" / "a.txt")
    write(tmp_path / "top" / "deep" / "b.txt")
    write(tmp_path / "top" / "c.md")
    assert find(tmp_path / "top" / "a.txt") == ["top/a.txt"]
    assert find(tmp_path / "top" / "**" / "*.txt") == ["deep/b.txt", "top/a.txt"]


def test_existing_folder_with_glob_signs_in_its_name_is_a_folder(tmp_path: Path) -> None:
    write(tmp_path / "top[1]" / "a.py")
    assert find(tmp_path / "top[1]") == ["top[1]/a.py"]


def test_missing_entry_and_entry_without_text_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "top" / "a.py")
    write(tmp_path / "other" / "a.txt")
    with pytest.raises(FileNotFoundError, match="nowhere' does not exist; name a folder"):
        find(tmp_path / "top", tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"\*\.rs' does not exist"):
        find(tmp_path / "*.rs")
    with pytest.raises(ValueError, match=r"other' has no files \(\.py\); set data\.extensions"):
        find(tmp_path / "top", tmp_path / "other")


def test_sample_is_whole_documents_of_at_most_the_size(tmp_path: Path) -> None:
    for index in range(20):
        write(tmp_path / "top" / f"{index:02}.py", "x" * 100)
    whole = find(tmp_path / "top")
    sample = find(tmp_path / "top", max_bytes=550)
    assert len(sample) == 5
    assert sample == sorted(sample)
    assert sample != whole[:5]
    assert set(sample) == set(sorted(whole, key=name_hash)[:5])
    assert len(find(tmp_path / "top", max_bytes=1)) == 1
