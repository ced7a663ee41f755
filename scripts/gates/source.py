"""Parsed source files, and the one shape in which every gate reports.

sources = read_sources([folder / "src"], root=folder)
for problem in check_budgets(sources):
    print(problem)          # packages/x/src/x/plan.py:12: function `plan` has 71 lines; ...
"""

import ast
import io
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One violation: where, what was found, and what to do about it."""

    path: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One Python file: its path below the root, its dotted module name, its text and its tree."""

    path: str
    module: str
    text: str
    tree: ast.Module

    @property
    def lines(self) -> list[str]:
        """The text, line by line."""
        return self.text.splitlines()

    @property
    def is_package(self) -> bool:
        """Whether this is the `__init__.py` of a package."""
        return self.path.endswith("/__init__.py")

    def comments(self) -> Iterator[tokenize.TokenInfo]:
        """Every comment; what looks like one inside a string is none."""
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type == tokenize.COMMENT:
                yield token

    def functions(self) -> Iterator[FunctionNode]:
        """Every function and method, nested ones included."""
        for node in ast.walk(self.tree):
            if isinstance(node, FunctionNode):
                yield node


def read_sources(folders: Iterable[Path], *, root: Path, pattern: str = "*.py") -> list[Source]:
    """Parse every Python file below the folders; each folder is one that stands on sys.path.

    With the pattern `__init__.pyi` it reads the faces: stubs that have the name of their package.

    Raises:
        SyntaxError: a file does not parse.
    """
    sources = []
    for folder in folders:
        for file in sorted(folder.rglob(pattern)):
            parts = file.relative_to(folder).with_suffix("").parts
            text = file.read_text()
            sources.append(
                Source(
                    path=file.relative_to(root).as_posix(),
                    module=".".join(p for p in parts if p != "__init__"),
                    text=text,
                    tree=ast.parse(text, filename=str(file)),
                )
            )
    return sources


def as_text(problems: Iterable[Problem]) -> str:
    """All problems, a line each; empty when there are none."""
    return "\n".join(str(problem) for problem in problems)
