"""Public names of the libraries that the trainer does not reach: a list that must not grow.

A library without a user is not proved. `unreached.toml` has every public name (of faces and doors)
of the day on which this gate began: those that moe-train reached, and those that it did not. A name
that was reached has to stay so; one that is reached at last is moved by hand. Names that are newer,
or gone, are not looked at.

Reached is what some definition of moe_train uses, what that one's own body uses, and so on, by name
and by import: more than what a key reaches in a test, so the true list is longer, never shorter.
"""

import ast
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from gates.imports import exported
from gates.source import Problem, Source

UNREACHED = Path("scripts", "gates", "unreached.toml")
_TRAINER = "moe_train"
_DEEPEST = 12  # doors that hand on a name of doors
_Definition = tuple[str, str]  # module and name
_TopLevel = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


def check_unreached(
    sources: Sequence[Source], stubs: Sequence[Source], *, names: str
) -> list[Problem]:
    """Names that moe-train reached once and does not any more; `names` is the text of the list."""
    graph = _Graph(sources, stubs)
    reached = graph.reached_from(_TRAINER)
    listed = tomllib.loads(names)
    return [
        Problem(
            path=UNREACHED.as_posix(),
            line=1,
            message=f"`{package}.{name}` of packages/{package.replace('_', '-')}/ was reached by "
            "moe-train and is not any more; let a key of the trainer use it, take it out of the "
            "library, or move it to `unreached` with a reason",
        )
        for package, lists in listed.items()
        for name in lists["reached"]
        if (found := graph.public(package, name)) is not None and found not in reached
    ]


class _Graph:
    """Top-level definitions of all our modules, and which others each of them uses."""

    def __init__(self, sources: Iterable[Source], stubs: Iterable[Source]) -> None:
        self._doors: dict[str, frozenset[str]] = {}
        self._definitions: dict[str, dict[str, list[ast.stmt]]] = {}
        self._imported: dict[str, dict[str, tuple[str, str | None]]] = {}
        self._loose: dict[str, list[ast.stmt]] = {}
        for source in sources:
            self._definitions[source.module] = _definitions(source.tree)
            self._imported[source.module] = dict(_imports(source))
            self._loose[source.module] = [n for n in source.tree.body if isinstance(n, ast.Expr)]
            if source.is_package:
                self._doors[source.module] = exported(source.tree)
        for stub in stubs:
            self._imported.setdefault(stub.module, {}).update(_imports(stub))
            self._doors[stub.module] = exported(stub.tree)

    def public(self, package: str, name: str) -> _Definition | None:
        """What a door's or the face's name means; None where it is gone, or a module."""
        room, _, last = f"{package}.{name}".rpartition(".")
        if last not in self._doors.get(room, ()):
            return None
        found = self._meaning(room, last)
        return found if found is not None and found[1] else None

    def reached_from(self, package: str) -> set[_Definition]:
        """Every definition that those of the package use, directly or by others."""
        seen: set[_Definition] = set()
        entered: set[str] = set()
        modules = [m for m in self._definitions if m.split(".")[0] == package]
        left = [(module, name) for module in modules for name in self._definitions[module]]
        while left:
            module, name = found = left.pop()
            if found in seen:
                continue
            seen.add(found)
            bodies = list(self._definitions[module].get(name, ()))
            if module not in entered:  # what runs when the module is imported
                entered.add(module)
                bodies += self._loose[module]
            left += [used for body in bodies for used in self._used(module, body)]
        return seen

    def _used(self, module: str, body: ast.stmt) -> Iterator[_Definition]:
        for node in ast.walk(body):
            found = None
            if isinstance(node, ast.Name):
                found = self._meaning(module, node.id)
            elif isinstance(node, ast.Attribute):
                found = self._dotted(module, node)
            elif isinstance(node, ast.ImportFrom):
                meanings = (self._meaning(node.module or "", alias.name) for alias in node.names)
                yield from (meaning for meaning in meanings if meaning is not None and meaning[1])
            if found is not None and found[1]:
                yield found

    def _dotted(self, module: str, node: ast.Attribute) -> _Definition | None:
        """What `room.part.name` means."""
        parts: list[str] = []
        value: ast.expr = node
        while isinstance(value, ast.Attribute):
            parts.insert(0, value.attr)
            value = value.value
        found = self._meaning(module, value.id) if isinstance(value, ast.Name) else None
        while found is not None and not found[1] and parts:
            found = self._meaning(found[0], parts.pop(0))
        return found

    def _meaning(self, module: str, name: str, depth: int = 0) -> _Definition | None:
        """The definition behind a name of a module; of a module that module, without a name."""
        if name in self._definitions.get(module, {}):
            return module, name
        if name in self._imported.get(module, {}) and depth < _DEEPEST:
            base, imported = self._imported[module][name]
            if imported is None:
                return base, ""
            if base != module:
                found = self._meaning(base, imported, depth + 1)
                if found is not None:
                    return found
        inner = f"{module}.{name}"
        return (inner, "") if inner in self._definitions else None


def _definitions(tree: ast.Module) -> dict[str, list[ast.stmt]]:
    found: dict[str, list[ast.stmt]] = {}
    for node in tree.body:
        if not isinstance(node, _TopLevel):
            continue
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        else:
            found.setdefault(node.name, []).append(node)
        for target in targets:
            if isinstance(target, ast.Name):
                found.setdefault(target.id, []).append(node)
    return found


def _imports(source: Source) -> Iterator[tuple[str, tuple[str, str | None]]]:
    """Each name that an import binds, anywhere in the file: its module, and the name in that."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name, (node.module or "", alias.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                yield alias.asname or first, (alias.name if alias.asname else first, None)
