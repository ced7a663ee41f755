"""benchmarks/claims.toml as data: one claim an entry, checked before anything is run.

[[claim]]
id = "comm-collectives-alltoall"            # unique
package = "comm-collectives"                # or "repository"
statement = "An uneven all-to-all costs what gloo's own does."
command = "python benchmarks/alltoall.py"   # or: pytest <file>::<test>
figure = "alltoall_over_gloo"               # name in the JSON line; for tests: "passed"
unit = "x"
limit = "<= 1.05"
peer = "raw gloo"
gpu = false
timeout_s = 600                             # optional; 1800 when absent
"""

import ast
import operator
import re
import shlex
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gates.source import Problem
from workspace import read_packages

LEDGER = "benchmarks/claims.toml"
REPOSITORY = "repository"
DEFAULT_TIMEOUT_S = 1800

_LIMIT = re.compile(r"(<=|>=|<|>)\s*([-+0-9.eE]+)")
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
_TYPES = {
    "id": str,
    "package": str,
    "statement": str,
    "command": str,
    "figure": str,
    "unit": str,
    "limit": str,
    "peer": str,
    "gpu": bool,
}
_OPTIONAL = {"timeout_s": int}


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One promise: the command that shows it, the figure to look at, and its limit."""

    id: str
    package: str
    statement: str
    command: str
    figure: str
    unit: str
    limit: str
    peer: str
    gpu: bool
    timeout_s: int = DEFAULT_TIMEOUT_S

    def holds(self, value: float) -> bool:
        """Whether a measured value is within the limit; NaN never is."""
        match = _LIMIT.fullmatch(self.limit)
        if match is None:
            raise ValueError(f"claim {self.id}: limit {self.limit!r}; write it as `<= 1.05`")
        return _COMPARE[match[1]](value, float(match[2]))


def read_ledger(root: Path) -> list[Claim]:
    """All claims, in the order of the file.

    Raises:
        ValueError: an entry lacks a key, or has an unknown one or one of the wrong type.
    """
    claims = []
    for entry in _entries(root):
        messages = _entry_messages(entry)
        if messages:
            raise ValueError(f"{LEDGER}: claim {entry.get('id')!r}: {messages[0]}")
        claims.append(Claim(**entry))
    return claims


def check_ledger(root: Path) -> list[Problem]:
    """Every entry well formed, ids unique, commands pointing at files and tests that exist."""
    problems: list[Problem] = []
    packages = {p.name for p in read_packages(root)} | {REPOSITORY}
    seen: set[str] = set()
    for entry in _entries(root):
        messages = _entry_messages(entry)
        if not messages:
            claim = Claim(**entry)
            messages = _reference_messages(claim, packages, root)
            if claim.id in seen:
                messages.append("the id stands twice")
            seen.add(claim.id)
        problems += [
            Problem(path=LEDGER, line=1, message=f"claim {entry.get('id')!r}: {message}")
            for message in messages
        ]
    return problems


def _entries(root: Path) -> list[dict[str, Any]]:
    file = root / LEDGER
    entries: list[dict[str, Any]] = tomllib.loads(file.read_text()).get("claim", [])
    return entries


def _entry_messages(entry: dict[str, Any]) -> list[str]:
    found = [f"key `{key}` is missing" for key in _TYPES if key not in entry]
    for key, value in entry.items():
        expected = (_TYPES | _OPTIONAL).get(key)
        if expected is None:
            found.append(f"unknown key `{key}`; the keys are {', '.join(_TYPES | _OPTIONAL)}")
        elif type(value) is not expected:
            found.append(f"`{key}` is {value!r}; expected a {expected.__name__}")
        elif value == "":
            found.append(f"`{key}` is empty")
    return found


def _reference_messages(claim: Claim, packages: set[str], root: Path) -> list[str]:
    found = []
    if claim.package not in packages:
        found.append(f"package {claim.package!r} is none of {', '.join(sorted(packages))}")
    if not _LIMIT.fullmatch(claim.limit):
        found.append(f"limit {claim.limit!r}; write it as `<= 1.05`")
    words = shlex.split(claim.command)
    if words[0] == "python" and len(words) > 1:
        if not (root / words[1]).is_file():
            found.append(f"{words[1]} does not exist")
    elif words[0] == "pytest":
        if claim.figure != "passed":
            found.append(f"a test's figure is `passed`, not `{claim.figure}`")
        found += [message for word in words[1:] for message in _test_messages(word, root)]
    else:
        found.append(f"command {claim.command!r} is neither `python <file>` nor `pytest <test>`")
    return found


def _test_messages(word: str, root: Path) -> list[str]:
    path, _, test = word.partition("::")
    if not path.endswith(".py"):
        return []
    file = root / path
    if not file.is_file():
        return [f"{path} does not exist"]
    name = test.split("[")[0]
    names = {
        n.name for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.FunctionDef)
    }
    return [f"{path} has no test {name}"] if name and name not in names else []
