"""What tests, benchmarks and examples import of the packages is there.

Each of them runs at its own time, so that a name which left a door is missed only then.

    check_missing(callers, sources, stubs)
"""

import ast
from collections.abc import Iterable, Iterator, Sequence

from gates.imports import Modules, exported
from gates.source import Problem, Source


def check_missing(
    callers: Iterable[Source], sources: Sequence[Source], stubs: Sequence[Source]
) -> list[Problem]:
    """Names that are taken from a module which does not bind them."""
    modules = Modules.of(sources, stubs)
    bound = {name: frozenset(_bound(source.tree)) for name, source in modules.by_name.items()}
    for stub in stubs:
        bound[stub.module] |= exported(stub.tree) | frozenset(_bound(stub.tree))
    problems = []
    for source in callers:
        for use in modules.imports_of(source):
            missing = sorted(set(use.names) - bound[use.target] - {"*"})
            for name in missing:
                message = f"{use.target} has no {name}; import it from the file that defines it"
                problems.append(Problem(path=source.path, line=use.line, message=message))
    return problems


def _bound(tree: ast.AST) -> Iterator[str]:
    """The names that a module binds, at its top or below conditions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                yield (alias.asname or alias.name).partition(".")[0]
        else:
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id
            yield from _bound(node)
