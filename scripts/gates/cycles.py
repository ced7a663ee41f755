"""Import cycles among our modules, imports inside functions and under TYPE_CHECKING counted.

A cycle that hides in a function-level import is still a cycle: neither module can be understood,
moved or tested without the other. A name taken from the `__init__` of a package counts as an import
of that package; a lazy one imports what its stub says.
"""

import ast
from collections.abc import Iterable
from graphlib import CycleError, TopologicalSorter

from gates.source import Problem, Source


def check_cycles(sources: Iterable[Source]) -> list[Problem]:
    """One problem for every cycle that remains once the earlier ones are cut at one edge."""
    by_module = {source.module: source for source in sources}
    graph = import_graph(by_module)
    problems = []
    while True:
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            cycle = list(reversed(error.args[1]))
            problems.append(
                Problem(
                    path=by_module[cycle[0]].path,
                    line=1,
                    message=f"import cycle: {' -> '.join(cycle)}; move what both need into a third "
                    "module, or pass it as an argument",
                )
            )
            graph[cycle[0]].discard(cycle[1])
        else:
            return problems


def import_graph(by_module: dict[str, Source]) -> dict[str, set[str]]:
    """Which of our modules each of our modules imports, anywhere in its text."""
    graph = {}
    for name, source in by_module.items():
        targets: set[str] = set()
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Import):
                targets |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                targets |= _from_import(node, source, by_module)
        graph[name] = {t for t in targets if t in by_module and t != name}
    return graph


def _from_import(node: ast.ImportFrom, source: Source, by_module: dict[str, Source]) -> set[str]:
    base = _absolute(node, source)
    targets = set()
    for alias in node.names:
        if f"{base}.{alias.name}" in by_module:
            targets.add(f"{base}.{alias.name}")
        else:
            targets.add(base)
    return targets


def _absolute(node: ast.ImportFrom, source: Source) -> str:
    if node.level == 0:
        return node.module or ""
    parts = source.module.split(".")
    keep = len(parts) - node.level + (1 if source.is_package else 0)
    return ".".join([*parts[:keep], *([node.module] if node.module else [])])
