"""Pages that lead a newcomer: docs/where-is.md, each package's ARCHITECTURE.md, and its facts.

A line of where-is.md is a question and two hops, the page of a package and the place in it:

- Who decides the order of a combine's sum? -> [comm-collectives](../packages/.../README.md) ->
  [`Combine.sum`](../packages/.../moe/combine.py#Combine.sum)

What stands after `#`, and what stands in backticks, is defined in the linked file; the first page
names the room of the second. A page of the repository (docs/, README.md) may be a hop too.

The tests of a package call each of the checks that hold its README and its face to the code.
"""

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gates.source import Problem
from workspace import Package

WHERE_IS = Path("docs", "where-is.md")
QUESTIONS = 30
ARCHITECTURE_LINES = 60

# The shared checks of scripts/package_facts.py, which the tests of every package call.
FACTS = (
    "check_names",
    "check_import_is_cheap",
    "run_examples",
    "check_tour",
    "check_name_table",
    "check_wrong_types",
)

_LINK = re.compile(r"\[(?P<label>[^\]]+)\]\((?P<target>[^)\s]+)\)")
_SYMBOL = re.compile(r"`([A-Za-z_][A-Za-z0-9_.]*)(?:\(\))?`")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hop:
    label: str
    path: Path  # of the file or folder
    symbols: tuple[str, ...]


def check_pages(packages: Sequence[Package], *, root: Path) -> list[Problem]:
    """What is wrong with where-is.md and with the packages' ARCHITECTURE.md."""
    return [*_where_is(packages, root), *(p for package in packages for p in _page(package, root))]


def _page(package: Package, root: Path) -> Iterator[Problem]:
    file = package.folder / "ARCHITECTURE.md"
    path = file.relative_to(root).as_posix()
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    if not lines:
        yield _problem(path, 1, "is missing; write it: floors, the way of one call, where to add")
    if len(lines) > ARCHITECTURE_LINES:
        yield _problem(path, 1, f"{len(lines)} lines; at most {ARCHITECTURE_LINES}")
    tests = package.folder / "tests" / "test_package.py"
    tree = ast.parse(tests.read_text(encoding="utf-8")) if tests.is_file() else ast.Module([], [])
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    called = {function.id for function in calls if isinstance(function, ast.Name)}
    for fact in FACTS:
        if fact not in called:
            path = tests.relative_to(root).as_posix()
            yield _problem(path, 1, f"does not call {fact} of scripts/package_facts.py")


def _where_is(packages: Sequence[Package], root: Path) -> Iterator[Problem]:
    path = WHERE_IS.as_posix()
    file = root / WHERE_IS
    questions = 0
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    for number, line in enumerate(_joined(lines), start=1):
        if not line.startswith("- "):
            continue
        questions += 1
        for message in _question(line, packages, root):
            yield _problem(path, number, message)
    if questions < QUESTIONS:
        yield _problem(path, 1, f"{questions} questions; at least {QUESTIONS}")


def _joined(lines: list[str]) -> Iterator[str]:
    """The lines, those that go on in indented ones as a whole; as many as before."""
    for i, line in enumerate(lines):
        whole = line
        for more in lines[i + 1 :] if line.startswith("- ") else ():
            if not more.startswith("  "):
                break
            whole += f" {more.strip()}"
        yield whole


def _question(line: str, packages: Sequence[Package], root: Path) -> Iterator[str]:
    links = list(_LINK.finditer(line))
    question = line[2:].partition(" -> ")[0].strip()
    if len(links) != 2 or line.count(" -> ") != 2 or not question.endswith("?"):
        yield "write `- <question>? -> [package](its page) -> [place](file or folder)`"
        return
    hops = []
    for link in links:
        target, _, symbol = link["target"].partition("#")
        path = (root / WHERE_IS.parent / target).resolve()
        if not path.exists():
            yield f"{target} does not exist"
            return
        symbols = [symbol] if symbol else []
        symbols += [s for s in _SYMBOL.findall(link["label"]) if not s.endswith((".py", ".md"))]
        hops.append(_Hop(label=link["label"], path=path, symbols=tuple(symbols)))
    for hop in hops:
        for symbol in dict.fromkeys(hop.symbols):
            if not _defines(hop.path, symbol):
                yield f"`{symbol}` is not defined in {hop.path.relative_to(root.resolve())}"
    yield from _two_hops(hops[0], hops[1], packages, root)


def _two_hops(first: _Hop, second: _Hop, packages: Sequence[Package], root: Path) -> Iterator[str]:
    """The first is a package's page, the second lies in that package and is named by the page."""
    folders = {p.folder.resolve() for p in packages}
    if first.path.suffix != ".md":
        yield f"the first hop, [{first.label}], is no page; link a README.md or ARCHITECTURE.md"
        return
    home = {folder for folder in folders if folder in first.path.parents}
    there = {folder for folder in folders if folder in second.path.parents}
    if home and there and home != there:
        yield f"[{second.label}] lies in another package than [{first.label}]"
    name = _room(second.path, folders)
    if there and name not in first.path.read_text(encoding="utf-8"):
        page = first.path.relative_to(root.resolve())
        yield f"{page} does not name `{name}`, so that the second hop cannot be found from it"


def _room(path: Path, folders: set[Path]) -> str:
    """The room that a reader looks for, `router/`; the file's name where it stands in none."""
    for folder in folders & set(path.parents):
        parts = path.relative_to(folder).parts  # src, package, room, ...
        in_room = parts[0] == "src" and len(parts) > (2 if path.is_dir() else 3)
        return f"{parts[2]}/" if in_room else path.name
    return path.name


def _defines(path: Path, symbol: str) -> bool:
    """Whether a file, or one of a folder's files, has that function, class, constant or heading."""
    if path.is_dir():
        return any(_defines(file, symbol) for file in sorted(path.glob("*.py")))
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return symbol in set(_defined(ast.parse(text).body, ""))
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    slugs = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
    return symbol in slugs or re.search(rf"(?<!\w){re.escape(symbol)}(?!\w)", text) is not None


def _defined(body: list[ast.stmt], prefix: str) -> Iterator[str]:
    """Names bound in a module or class; what a class has as `Class.name`, too."""
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield prefix + node.name
            case ast.ClassDef():
                yield prefix + node.name
                yield from _defined(node.body, f"{prefix}{node.name}.")
            case ast.Assign():
                yield from (prefix + t.id for t in node.targets if isinstance(t, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield prefix + name


def _problem(path: str, line: int, message: str) -> Problem:
    return Problem(path=path, line=line, message=message)
