"""Findings that a line of code may keep with a reason, and the comments that hold the reasons.

    _INSTALLATION.pool = pool  # gate: module-state - CuPy has one allocator per process

The comment stands on the line of the finding, or alone on the line before it. In the head of a
file, before its first import or definition, it is meant for the whole file. A comment that excuses
nothing is a problem itself, so that none outlives its finding.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gates.source import Problem, Source

# code -> what it stands for, as the gates that know it tell it.
CODES = {
    "any-keywords": "habits",
    "splat": "habits",
    "module-state": "habits",
    "late-attribute": "habits",
    "setattr": "habits",
    "position": "habits",
    "plain-error": "habits",
    "names-test": "habits",
    "same-name": "repeats",
    "clone": "repeats",
}

_COMMENT = re.compile(r"#\s*gate:\s*(?P<code>[\w-]*)(?P<reason>.*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a gate found: its code, where it is, what it is and what to do."""

    code: str
    source: Source
    line: int
    message: str

    @property
    def problem(self) -> Problem:
        """The finding without its source, and with the comment that would excuse it."""
        return Problem(
            path=self.source.path,
            line=self.line,
            message=f"{self.message} (if it has to stay: `# gate: {self.code} - why`)",
        )


@dataclass(frozen=True, slots=True)
class _Comment:
    code: str
    has_reason: bool
    line: int
    meant: range  # the lines that it is meant for


def without_reason(gate: str, sources: Iterable[Source], found: list[Finding]) -> list[Problem]:
    """The findings that no comment excuses, and comments of this gate that are wrong.

    Args:
        gate: the gate that found them, as CODES names it.
        sources: all files that were looked at.
        found: what the gate found in them.
    """
    problems: list[Problem] = []
    excused: set[int] = set()
    for source in sources:
        here = {i: f for i, f in enumerate(found) if f.source is source}
        for comment in _comments(source):
            if CODES.get(comment.code, "habits") != gate:
                continue
            meant = {
                i for i, f in here.items() if f.code == comment.code and f.line in comment.meant
            }
            wrong = _wrong(comment, bool(meant))
            if wrong:
                problems.append(Problem(path=source.path, line=comment.line, message=wrong))
            else:
                excused |= meant
    return problems + [f.problem for i, f in enumerate(found) if i not in excused]


def _wrong(comment: _Comment, excuses: bool) -> str:
    if comment.code not in CODES:
        return f"`gate: {comment.code}` is no code; the codes are {', '.join(CODES)}"
    if not comment.has_reason:
        return f"`gate: {comment.code}` without a reason; write `# gate: {comment.code} - why`"
    return "" if excuses else f"`gate: {comment.code}` excuses nothing here; remove it"


def _comments(source: Source) -> Iterator[_Comment]:
    if "gate:" not in source.text:
        return
    lines = source.lines
    head = _head_lines(source)
    for comment in source.comments():
        match = _COMMENT.match(comment.string)
        if match is None:
            continue
        line = comment.start[0]
        meant = range(line, line + 1)
        if lines[line - 1].lstrip().startswith("#"):
            after = line + 1
            while after <= len(lines) and lines[after - 1].lstrip().startswith("#"):
                after += 1  # the reason goes on
            meant = range(1, len(lines) + 1) if line <= head else range(after, after + 1)
        has_reason = len(re.findall(r"\w{2,}", match["reason"])) >= 2
        yield _Comment(match["code"], has_reason, line, meant)


def _head_lines(source: Source) -> int:
    """The number of lines before the first statement after the docstring."""
    body = source.tree.body
    docstring = bool(body) and isinstance(body[0], ast.Expr)
    rest = body[1:] if docstring else body
    return rest[0].lineno - 1 if rest else len(source.lines)
