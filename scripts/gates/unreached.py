"""Public names of the libraries that no trainer and no command reaches, and for whom they are.

A library without a user is not proved. Every public name (of faces and doors) is reached by
moe-train, or by the command line of its own package, or stands in `unreached.toml` under the words
that say for whom else it is: at most 15 names. A name there that is reached, or that is gone, has
to leave the list.

Reached is what some definition of moe_train, or of the command, uses, what that one's own body
uses, and so on, by name, by import and by the name of a module that is run: more than what a key
reaches in a test.
"""

import ast
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from gates.imports import exported
from gates.source import Problem, Source

UNREACHED = Path("scripts", "gates", "unreached.toml")
MOST_NAMES = 15
_TRAINER = "moe_train"
_COMMANDS = ("cli", "commands", "__main__")
_DEEPEST = 12  # doors that hand on a name of doors
_Definition = tuple[str, str]  # module and name
_TopLevel = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


def check_unreached(
    sources: Sequence[Source], stubs: Sequence[Source], *, names: str
) -> list[Problem]:
    """Public names without a user, and entries of the list that are none; `names` is its text."""
    groups = tomllib.loads(names)
    listed = {name: whom for whom, names_of in groups.items() for name in names_of}
    found = unreached(sources, stubs)
    problems = [
        f"`{name}` is reached neither by moe-train nor by a command; let a key of the trainer use "
        "it, keep it out of faces and doors, or list it under the words that say for whom it is"
        for name in sorted(found - listed.keys())
    ]
    problems += [
        f"`{name}` is listed as reached by nobody ({whom}), but it is reached, or is no public "
        "name any more; take it out of the list"
        for name, whom in listed.items()
        if name not in found
    ]
    if len(listed) > MOST_NAMES:
        problems.append(f"{len(listed)} names without a user; at most {MOST_NAMES}")
    if len(listed) < sum(len(names_of) for names_of in groups.values()):
        problems.append("a name is listed twice")
    return [Problem(path=UNREACHED.as_posix(), line=1, message=text) for text in problems]


def unreached(sources: Sequence[Source], stubs: Sequence[Source]) -> set[str]:
    """Public names, each by its shortest path, that neither the trainer nor a command reaches."""
    graph = _Graph(sources, stubs)
    modules = [source.module for source in sources]
    trained = graph.reached_from(m for m in modules if m.split(".")[0] == _TRAINER)
    found: set[str] = set()
    for package in sorted({module.split(".")[0] for module in modules} - {_TRAINER}):
        commands = {f"{package}.{name}" for name in _COMMANDS}
        its = (m for m in modules if ".".join(m.split(".")[:2]) in commands)
        reached = trained | graph.reached_from(its)
        found |= {name for name, meaning in graph.public_names(package) if meaning not in reached}
    return found


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

    def public_names(self, package: str) -> Iterator[tuple[str, _Definition]]:
        """What the package's face and doors offer, each thing under its shortest name."""
        paths: dict[_Definition, str] = {}
        for door in sorted(d for d in self._doors if d.split(".")[0] == package):
            for last in sorted(self._doors[door]):
                found = self._meaning(door, last)
                if found is None or not found[1]:  # gone, or a module
                    continue
                path = f"{door}.{last}"
                if found not in paths or path.count(".") < paths[found].count("."):
                    paths[found] = path
        return ((path, found) for found, path in paths.items())

    def reached_from(self, modules: Iterable[str]) -> set[_Definition]:
        """Every definition that those of the modules use, directly or by others."""
        seen: set[_Definition] = set()
        entered: set[str] = set()
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
            elif isinstance(node, ast.Constant) and node.value in self._definitions:
                module_run = str(node.value)  # `python -m` of it
                yield from ((module_run, name) for name in self._definitions[module_run])
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
        if isinstance(value, ast.Call) and ast.unparse(value.func) == "import_module":
            found = ast.unparse(value.args[0]).strip("'"), ""
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
