"""Count what the rooms promise, and print each count as a figure of benchmarks/claims.toml.

python scripts/count_rooms.py       # {"figure": "largest_folder", "value": 18, ...} and more lines
"""

import json
from collections.abc import Iterator
from pathlib import Path

from gates.doors import check_doors
from gates.imports import Modules
from gates.lines import count_lines
from gates.pages import check_pages
from gates.repeats import check_repeats
from gates.rooms import check_rooms, folder_files, longest_chains
from gates.source import read_sources
from gates.words import GLOSSARY, check_words
from workspace import ROOT, read_packages


def figures(root: Path) -> Iterator[tuple[str, int]]:
    """The name and the value of each count."""
    packages = read_packages(root)
    folders = [p.folder / "src" for p in packages]
    sources = read_sources(folders, root=root)
    stubs = read_sources(folders, root=root, pattern="__init__.pyi")
    modules = Modules.of(sources, stubs)
    glossary = (root / GLOSSARY).read_text()
    yield "largest_folder", max(folder_files(modules).values())
    yield "longest_chain_of_rooms", max(map(len, longest_chains(modules).values()), default=0)
    yield "largest_face", max((len(modules.exports[stub.module]) for stub in stubs), default=0)
    # Past a door, circles, folders and chains that are too large; doors with too many names.
    yield "problems_of_rooms", len(check_rooms(sources, stubs)) + len(check_doors(sources, stubs))
    yield "words_unexplained", len(check_words(packages, sources, stubs, glossary=glossary))
    yield "problems_of_pages", len(check_pages(packages, root=root))
    yield "repeats_without_reason", len(check_repeats(sources))
    yield "lines_of_src", sum(count_lines(package) for package in packages)


if __name__ == "__main__":
    for name, value in figures(ROOT):
        print(json.dumps({"figure": name, "value": value}))
