"""The same lines standing in two places of src.

Lines are compared without indentation, comments, docstrings, imports and lines of mere
punctuation. A run of more than eight such lines that stands twice is a problem: one piece of code
should serve both, or the two should differ where they mean different things.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from gates.source import Problem, Source

MOST_LINES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    path: str
    number: int
    text: str


def check_duplicates(sources: Iterable[Source]) -> list[Problem]:
    """One problem for each maximal run of more than eight lines that stands in two places."""
    files = [_significant_lines(source) for source in sources]
    window = MOST_LINES + 1
    places: dict[tuple[str, ...], list[tuple[int, int]]] = defaultdict(list)
    for f, lines in enumerate(files):
        for start in range(len(lines) - window + 1):
            key = tuple(line.text for line in lines[start : start + window])
            places[key].append((f, start))
    problems = []
    for found in places.values():
        for i, first in enumerate(found):
            for second in found[i + 1 :]:
                if not _continues(files, first, second):
                    problems.append(_problem(files, first, second))
    return problems


def _continues(files: list[list[_Line]], first: tuple[int, int], second: tuple[int, int]) -> bool:
    """Whether the lines before are alike too, so that an earlier window tells of this run."""
    (f, i), (g, j) = first, second
    return i > 0 and j > 0 and files[f][i - 1].text == files[g][j - 1].text


def _problem(files: list[list[_Line]], first: tuple[int, int], second: tuple[int, int]) -> Problem:
    (f, i), (g, j) = first, second
    length = 0
    while (
        i + length < len(files[f])
        and j + length < len(files[g])
        and files[f][i + length].text == files[g][j + length].text
    ):
        length += 1
    here, there = files[f][i], files[g][j]
    return Problem(
        path=here.path,
        line=here.number,
        message=f"{length} lines stand again at {there.path}:{there.number}; at most {MOST_LINES}: "
        "let one piece of code serve both",
    )


def _significant_lines(source: Source) -> list[_Line]:
    skipped = _docstring_and_import_lines(source.tree)
    without_comments = source.lines
    for comment in source.comments():
        row, column = comment.start
        without_comments[row - 1] = without_comments[row - 1][:column]
    return [
        _Line(path=source.path, number=number, text=" ".join(text.split()))
        for number, text in enumerate(without_comments, start=1)
        if number not in skipped and re.search(r"\w", text)
    ]


def _docstring_and_import_lines(tree: ast.Module) -> set[int]:
    skipped: set[int] = set()
    for node in ast.walk(tree):
        is_docstring = (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        )
        if is_docstring or isinstance(node, ast.Import | ast.ImportFrom):
            first = getattr(node, "lineno", 1)
            skipped.update(range(first, (getattr(node, "end_lineno", None) or first) + 1))
    return skipped
