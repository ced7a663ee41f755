"""Words: every name of a face, and every room, stands in docs/glossary.md with one sentence.

The glossary has a section for each package, and one for the whole repository:

    | word | meaning |
    | --- | --- |
    | `save` | writes a checkpoint that every rank takes part in |
"""

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gates.imports import Modules
from gates.source import Problem, Source
from workspace import Package

GLOSSARY = Path("docs", "glossary.md")
# One spelling each, in all names of src; what a file of old holds is a string and stays.
SPELLINGS = {
    re.compile(r"micro_batch|Micro_?Batch|MICRO_BATCH"): "microbatch",
    re.compile(r"(?:^|_)coeffs?(?=_|$)", re.IGNORECASE): "coef",
}

_COMMON = "Words of the whole repository"
_ROW = re.compile(r"^\|(?P<words>[^|]+)\|(?P<meaning>.*)\|\s*$")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    section: str
    words: tuple[str, ...]
    meaning: str
    line: int


def check_words(
    packages: Sequence[Package],
    sources: Sequence[Source],
    stubs: Sequence[Source],
    *,
    glossary: str,
) -> list[Problem]:
    """Names and rooms without a row, rows without a meaning, and words with two meanings."""
    rows = list(_rows(glossary))
    problems = [*_thin_rows(rows), *_two_meanings(rows)]
    modules = Modules.of(sources, stubs)
    for package in packages:
        name = package.import_name
        told = {w for r in rows if r.section in (package.name, _COMMON) for w in r.words}
        doors = [m for m, source in modules.by_name.items() if source.is_package]
        rooms = {door.split(".")[1] for door in doors if door.startswith(f"{name}.")}
        face = modules.exports.get(name, frozenset()) if name in {s.module for s in stubs} else ()
        for what, words in (("public name", set(face)), ("room", rooms)):
            problems += [
                _problem(
                    1,
                    f"no row for the {what} `{word}` of packages/{package.folder.name}/; write "
                    f"`| {word} | <one sentence> |` in its section",
                )
                for word in sorted(words - told)
            ]
    return problems


def check_spellings(sources: Sequence[Source]) -> list[Problem]:
    """Names in src that are spelled in a way that this repository gave up."""
    found = [
        Problem(
            path=source.path,
            line=getattr(node, "lineno", 1),
            message=f"`{name}`: this repository writes `{right}`",
        )
        for source in sources
        for node in ast.walk(source.tree)
        for name in _named(node)
        for wrong, right in SPELLINGS.items()
        if wrong.search(name)
    ]
    return list(dict.fromkeys(found))


def _named(node: ast.AST) -> Iterator[str]:
    for field in ("id", "attr", "arg", "name", "asname"):
        name = getattr(node, field, None)
        if isinstance(name, str):
            yield name


def _rows(text: str) -> Iterator[_Row]:
    section = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("## "):
            section = line[3:].strip()
        match = _ROW.match(line)
        if match is None or re.fullmatch(r"[\s|:-]+", line) or match["words"].strip() == "word":
            continue
        words = (w.strip().strip("`").rstrip("/") for w in match["words"].split(","))
        yield _Row(
            section=section,
            words=tuple(w for w in words if w),
            meaning=match["meaning"].strip(),
            line=number,
        )


def _thin_rows(rows: list[_Row]) -> Iterator[Problem]:
    for row in rows:
        if len(re.findall(r"\w+", row.meaning)) < 3:
            yield _problem(row.line, f"`{', '.join(row.words)}` is not explained; write a sentence")


def _two_meanings(rows: list[_Row]) -> Iterator[Problem]:
    first: dict[str, _Row] = {}
    for row in rows:
        for word in row.words:
            other = first.setdefault(word, row)
            if other.meaning != row.meaning or (other is not row and other.section == row.section):
                yield _problem(
                    row.line,
                    f"`{word}` ({row.section}) stands in line {other.line} ({other.section}) too; "
                    "one word has one meaning: keep one row, or rename one thing",
                )


def _problem(line: int, message: str) -> Problem:
    return Problem(path=GLOSSARY.as_posix(), line=line, message=message)
