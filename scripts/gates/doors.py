"""Doors and faces: what a room says of itself and lets out, and how many names a package shows.

A door (`__init__.py` of a folder below the package) holds a docstring and imports, nothing else.
The docstring says why the room exists, and in a line `May import:` which other rooms its files
import. A face is the stub `__init__.pyi`, the one list of a package's public names.

    \"\"\"Which experts each token goes to.

    May import: ops, and `layer` for types.
    \"\"\"
"""

import ast
import re
from collections.abc import Iterable, Iterator

from gates.imports import Modules
from gates.source import Problem, Source

DOCSTRING_LINES = 10
DOOR_NAMES = 12
CATALOGUE_NAMES = 24
FACE_NAMES = 24

# Doors to many things of one kind. Each says so in its docstring, in a line `Catalogue: <of what>`.
# A new one is an argument to be made in this list.
CATALOGUES = frozenset(
    {
        "comm_collectives.collectives",
        "comm_collectives.collectives.drop_in",  # torch's functions of the same names
        "moe_pipeline.schedules.generators",
        "moe_pipeline.families",
        "unified_ckpt.files",
    }
)

_MAY_IMPORT = re.compile(r"^May import:(.*(?:\n(?!\s*$|\w+:).*)*)", re.MULTILINE)
_CATALOGUE = re.compile(r"^Catalogue:", re.MULTILINE)
_ANY_ROOM = re.compile(r"\b(any|every|all)\b[\w ]*\brooms?\b")


def check_doors(sources: Iterable[Source], stubs: Iterable[Source] = ()) -> list[Problem]:
    """Docstring, contents and number of names of every door, and its `May import:` line."""
    modules = Modules.of(sources, stubs)
    problems: list[Problem] = []
    for door in modules.by_name.values():
        if door.is_package and "." in door.module:
            problems += _docstring(modules, door)
            problems += _contents(door)
            problems += _names(modules, door)
            problems += _may_import(modules, door)
    return problems


def check_faces(stubs: Iterable[Source]) -> list[Problem]:
    """Each package's stub exports at most 24 names."""
    problems = []
    for stub in stubs:
        count = sum(len(n.names) for n in stub.tree.body if isinstance(n, ast.ImportFrom))
        if count > FACE_NAMES:
            problems.append(
                _problem(
                    stub,
                    f"face of {count} names; at most {FACE_NAMES}: keep those of a user's first "
                    "week, the rest is imported from its room's door",
                )
            )
    return problems


def _docstring(modules: Modules, door: Source) -> Iterator[Problem]:
    text = ast.get_docstring(door.tree) or ""
    count = len(text.splitlines())
    if count > DOCSTRING_LINES:
        yield _problem(
            door,
            f"docstring of {count} lines; at most {DOCSTRING_LINES}: why the room exists and what "
            "it may import, the rest belongs to its modules",
        )
    if not _MAY_IMPORT.search(text):
        now = sorted({_words_for(door.module, there)[0] for there in _imported(modules, door)})
        yield _problem(
            door,
            f"docstring without a line `May import: <rooms>`; today its files import: "
            f"{', '.join(now) or 'no room'}",
        )


def _contents(door: Source) -> Iterator[Problem]:
    for node in door.tree.body:
        match node:
            case ast.Expr(value=ast.Constant()) | ast.Import() | ast.ImportFrom():
                continue
            case ast.Assign(targets=[ast.Name(id="__all__")]):
                continue
        yield _problem(
            door,
            "a door holds its docstring and imports alone; move the rest into a module of the room",
            node.lineno,
        )


def _names(modules: Modules, door: Source) -> Iterator[Problem]:
    says = _CATALOGUE.search(ast.get_docstring(door.tree) or "") is not None
    allowed = door.module in CATALOGUES
    if says and not allowed:
        yield _problem(
            door,
            "`Catalogue:` is for the doors listed in scripts/gates/doors.py; split the room, "
            "or argue for it in that list",
        )
    limit = CATALOGUE_NAMES if says and allowed else DOOR_NAMES
    lent = {
        name
        for use in modules.imports_of(door)
        if use.target in CATALOGUES and use.target != door.module
        for name in use.names
    }
    count = len(modules.exports[door.module] - lent)
    if count > limit:
        remedy = "export what other folders use, or split the room"
        if allowed and not says:
            remedy += f"; a line `Catalogue: <of what>` in the docstring allows {CATALOGUE_NAMES}"
        yield _problem(door, f"door of {count} names; at most {limit}: {remedy}")


def _may_import(modules: Modules, door: Source) -> Iterator[Problem]:
    """Rooms that the files of this folder import and the door's docstring does not name."""
    told = _MAY_IMPORT.search(ast.get_docstring(door.tree) or "")
    if told is None or _ANY_ROOM.search(told[1]):
        return
    words = set(re.findall(r"\w+", told[1].replace("-", "_")))
    for there, place in sorted(_imported(modules, door).items()):
        if not words.intersection(_words_for(door.module, there)):
            yield _problem(
                door,
                f"`May import:` does not name {there}, which is imported at {place}; name it, "
                "or import nothing from it",
            )


def _imported(modules: Modules, door: Source) -> dict[str, str]:
    """The folders that files of this folder import, each with one place where they do.

    Modules at the root of the package and the folder's own sub-rooms are left out.
    """
    here = door.module
    found: dict[str, str] = {}
    for name, source in modules.by_name.items():
        if modules.folder(name) != here:
            continue
        for use in modules.imports_of(source):
            there = modules.folder(use.target)
            if there != here.split(".")[0] and not f"{there}.".startswith(f"{here}."):
                found.setdefault(there, f"{source.path}:{use.line}")
    return found


def _words_for(here: str, there: str) -> list[str]:
    """The words by which the door of `here` may name the folder `there`, the best one first.

    A sibling package is named by its name; a room by its own name or by that of a room around it
    which `here` does not stand in.
    """
    package, *parts = there.split(".")
    if here.split(".")[0] != package:
        return [package]
    around = here.split(".")[1:]
    while len(parts) > 1 and around and parts[0] == around[0]:
        parts, around = parts[1:], around[1:]
    return parts


def _problem(source: Source, message: str, line: int = 1) -> Problem:
    return Problem(path=source.path, line=line, message=message)
