from pathlib import Path

from count_rooms import figures

DOOR = '"""Why.\n\nMay import: base\n"""\nfrom {0} import x as x\n'
GLOSSARY = "## a-b\n\n| `x` | the number of an answer |\n| top | the upper room |\n"
PROJECT = '[project]\nname = "a-b"\nversion = "0.1.0"\n'


def test_each_count_is_what_a_small_package_has(tmp_path: Path) -> None:
    files = {
        "docs/glossary.md": GLOSSARY,
        "packages/a-b/pyproject.toml": PROJECT,
        "packages/a-b/src/a_b/__init__.py": "",
        "packages/a-b/src/a_b/__init__.pyi": "from a_b.top import x as x\n",
        "packages/a-b/src/a_b/top/__init__.py": DOOR.format("a_b.top.m"),
        "packages/a-b/src/a_b/top/m.py": "from a_b.base.m import x\n_POLL_S = 1\n",
        "packages/a-b/src/a_b/base/__init__.py": DOOR.format("a_b.base.m"),
        "packages/a-b/src/a_b/base/m.py": "x = 42\n_POLL_S = 1\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert dict(figures(tmp_path)) == {
        "largest_folder": 2,
        "longest_chain_of_rooms": 2,
        "largest_face": 1,
        "problems_of_rooms": 1,  # m.py of `top` imports past the door of `base`
        "words_unexplained": 1,  # `base`
        "problems_of_pages": 8,  # no questions, no ARCHITECTURE.md, no test_package.py
        "repeats_without_reason": 1,  # _POLL_S
        "lines_of_src": 15,
    }
