"""Import cycles among our modules, imports inside functions and under TYPE_CHECKING counted.

A cycle that hides in a function-level import is still a cycle: neither module can be understood,
moved or tested without the other. A name taken from the `__init__` of a package counts as an import
of that package.
"""

from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter

from gates.imports import Modules
from gates.source import Problem, Source


def check_cycles(sources: Iterable[Source]) -> list[Problem]:
    """One problem for every cycle that remains once the earlier ones are cut at one edge."""
    modules = Modules.of(sources)
    graph = {
        name: {use.target for use in modules.imports_of(source)} - {name}
        for name, source in modules.by_name.items()
    }
    return [
        Problem(
            path=modules.by_name[cycle[0]].path,
            line=1,
            message=f"import cycle: {' -> '.join(cycle)}; move what both need into a third "
            "module, or pass it as an argument",
        )
        for cycle in cut_cycles(graph)
    ]


def cut_cycles(graph: dict[str, set[str]]) -> Iterator[list[str]]:
    """Yield a cycle (its first node again at its end), take its first edge away, and so on."""
    while True:
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            cycle = list(reversed(error.args[1]))
            yield cycle
            graph[cycle[0]].discard(cycle[1])
        else:
            return
