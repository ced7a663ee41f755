"""One home for a thing: names defined again and again, and clones of small functions and constants.

Within one package. `check_duplicates` finds long runs of equal lines; this finds what is short:
`aligned`, `round_up`, a poll interval. A repetition that has to be is kept with a comment,
`# gate: same-name - why` or `# gate: clone - why` (`gates/reasons.py`).
"""

import ast
import copy
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gates.reasons import Finding, without_reason
from gates.source import FunctionNode, Problem, Source

MODULES_OF_A_NAME = 2
CLONE_NODES = 16  # a body of fewer nodes of the syntax tree says too little to be a clone

# Definitions that each module needs for itself.
_EACH_ITS_OWN = ("TypeVar", "ParamSpec", "TypeVarTuple", "getLogger")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Definition:
    name: str
    source: Source
    node: ast.stmt

    @property
    def place(self) -> str:
        return f"{self.source.path}:{self.node.lineno}"


def check_repeats(sources: Iterable[Source]) -> list[Problem]:
    """Names defined in three or more modules of a package, and what stands in two of them.

    The finding is at the third module and each one after it.
    """
    sources = list(sources)
    found = [*_same_names(sources), *_same_constants(sources), *_same_functions(sources)]
    return without_reason("repeats", sources, found)


def _same_names(sources: list[Source]) -> Iterator[Finding]:
    by_name: dict[tuple[str, str], dict[str, _Definition]] = defaultdict(dict)
    for definition in _definitions(sources):
        package = definition.source.module.split(".")[0]
        by_name[package, definition.name].setdefault(definition.source.module, definition)
    for (package, name), places in by_name.items():
        for module in list(places)[MODULES_OF_A_NAME:]:
            others = ", ".join(sorted(m.partition(".")[2] for m in set(places) - {module}))
            yield _finding(
                "same-name",
                places[module],
                f"`{name}` is defined in {len(places)} modules of {package} (also {others}); "
                "give it one home, or each thing a name of its own",
            )


def _same_constants(sources: list[Source]) -> Iterator[Finding]:
    alike: dict[tuple[str, str, str], list[_Definition]] = defaultdict(list)
    for definition in _definitions(sources):
        value = getattr(definition.node, "value", None)
        if value is not None:
            package = definition.source.module.split(".")[0]
            alike[package, definition.name, ast.dump(value)].append(definition)
    for (_, name, _), same in alike.items():
        yield from _clones(same, f"`{name}` with the same value")


def _same_functions(sources: list[Source]) -> Iterator[Finding]:
    """Functions and methods that differ in nothing but the names of arguments and variables."""
    by_outline: dict[tuple[type, ...], list[tuple[Source, FunctionNode]]] = defaultdict(list)
    for source in sources:
        for function in source.functions():
            outline = tuple(type(node) for node in _body_nodes(function))
            if len(outline) >= CLONE_NODES:
                by_outline[outline].append((source, function))
    alike: dict[tuple[str, str], list[_Definition]] = defaultdict(list)
    for places in by_outline.values():
        for source, function in places if len(places) > 1 else ():
            definition = _Definition(name=function.name, source=source, node=function)
            alike[source.module.split(".")[0], _shape(function)].append(definition)
    for same in alike.values():
        names = " and ".join(dict.fromkeys(f"`{d.name}`" for d in same))
        yield from _clones(same, f"{names} with the same body")


def _clones(same: list[_Definition], what: str) -> Iterator[Finding]:
    """A finding at every place but the first, if they stand in more than one module."""
    first, *others = same
    for other in others:
        if other.source.path != first.source.path:
            yield _finding(
                "clone", other, f"{what} stands at {first.place} too; let one serve both"
            )


def _finding(code: str, definition: _Definition, message: str) -> Finding:
    return Finding(
        code=code, source=definition.source, line=definition.node.lineno, message=message
    )


def _definitions(sources: list[Source]) -> Iterator[_Definition]:
    """Functions, classes and constants at the top of the modules."""
    for source in sources:
        for node in source.tree.body:
            for name in _names(node):
                if not name.startswith("__"):
                    yield _Definition(name=name, source=source, node=node)


def _names(node: ast.stmt) -> list[str]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return [node.name]
        case ast.Assign() | ast.AnnAssign() if node.value is not None:
            function = node.value.func if isinstance(node.value, ast.Call) else None
            if function is not None and ast.unparse(function).split(".")[-1] in _EACH_ITS_OWN:
                return []
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            return [t.id for t in targets if isinstance(t, ast.Name)]
    return []


def _body(function: FunctionNode) -> list[ast.stmt]:
    has_docstring = ast.get_docstring(function, clean=False) is not None
    return function.body[1:] if has_docstring else function.body


def _body_nodes(function: FunctionNode) -> Iterator[ast.AST]:
    for statement in _body(function):
        yield from ast.walk(statement)


def _shape(function: FunctionNode) -> str:
    """The arguments and the body with all local names replaced by numbers, without types."""
    bare = copy.deepcopy(function)
    bare.body = _body(bare)
    bare.name, bare.returns, bare.decorator_list = "", None, []
    return ast.dump(_Renamed(bare).visit(bare))


class _Renamed(ast.NodeTransformer):
    """Replaces arguments and variables of a function by numbers, and drops their types."""

    def __init__(self, function: FunctionNode) -> None:
        local = [a.arg for a in ast.walk(function.args) if isinstance(a, ast.arg)]
        local += [
            n.id
            for n in ast.walk(function)
            if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
        ]
        self._number = {name: f"_{i}" for i, name in enumerate(dict.fromkeys(local))}

    def visit_Name(self, node: ast.Name) -> ast.Name:
        node.id = self._number.get(node.id, node.id)
        return node

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.arg, node.annotation = self._number.get(node.arg, node.arg), None
        return node
