"""Folders of a package as rooms: small, entered through their doors, and standing in floors.

A folder of src is a room, its `__init__.py` the door. A file imports from the modules of its own
folder, from the modules at the root of its package (errors, options, config, ...), and from the
doors of other folders; of another package from its face or a room's door. The modules at the root
are single nodes of the graph of folders: some are a base floor, some (cli) stand on top.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise

from gates.cycles import cut_cycles
from gates.imports import Modules, Use
from gates.source import Problem, Source

FOLDER_FILES = 20
CHAIN_ROOMS = 8

_Edges = dict[tuple[str, str], list[str]]  # (from folder, to folder) -> places of the imports


def check_rooms(sources: Iterable[Source], stubs: Iterable[Source] = ()) -> list[Problem]:
    """Sizes of folders, imports past doors, circles of folders and the longest chain of rooms.

    `stubs` are the faces (`__init__.pyi`), which enter rooms through their doors too.
    """
    stubs = list(stubs)
    modules = Modules.of(sources, stubs)
    problems = list(_folder_sizes(modules))
    for source in [*modules.by_name.values(), *stubs]:
        for use in modules.imports_of(source):
            message = _past_door(modules, source.module, use)
            if message is not None:
                problems.append(Problem(path=source.path, line=use.line, message=message))
    problems += _circles(folder_edges(modules))
    return problems + list(_chains(modules))


def folder_edges(modules: Modules) -> _Edges:
    """Every import from a folder into another one of the same package.

    Folders are dotted names, `pkg.room.sub`; a module at the root stands for itself, `pkg.errors`.
    """
    edges: _Edges = defaultdict(list)
    for name, source in modules.by_name.items():
        here = _node(modules, name)
        for use in modules.imports_of(source):
            there = _node(modules, use.target)
            if _package(here) == _package(there) and here != there and "." in here and "." in there:
                edges[here, there].append(f"{source.path}:{use.line}")
    return dict(edges)


def _node(modules: Modules, module: str) -> str:
    folder = modules.folder(module)
    return folder if "." in folder else module


def folder_files(modules: Modules) -> dict[str, int]:
    """The number of Python files of each folder, by its path."""
    return Counter(source.path.rpartition("/")[0] for source in modules.by_name.values())


def longest_chains(modules: Modules) -> dict[str, list[str]]:
    """The longest chain of rooms of each package that has rooms; a circle is cut at one edge."""
    edges = folder_edges(modules)
    graph = _graph((room_of(a), room_of(b)) for a, b in edges if room_of(a) != room_of(b))
    list(cut_cycles(graph))
    longest: dict[str, list[str]] = {}
    for start in sorted(graph):
        chain = _longest_chain(start, graph, modules)
        longest[_package(start)] = max(longest.get(_package(start), []), chain, key=len)
    return longest


def room_of(folder: str) -> str:
    """The room on the top level that a folder belongs to: `pkg.room.sub` -> `pkg.room`."""
    return ".".join(folder.split(".")[:2])


def _package(name: str) -> str:
    return name.split(".")[0]


def _folder_sizes(modules: Modules) -> Iterator[Problem]:
    for name, source in modules.by_name.items():
        if modules.folder(name) not in modules.by_name:
            yield _problem(source.path, "its folder has no __init__.py; give the room a door")
    for path, count in folder_files(modules).items():
        if count > FOLDER_FILES:
            yield _problem(
                path,
                f"{count} Python files in a folder; at most {FOLDER_FILES}: "
                "move those of one topic into a sub-room",
            )


def _past_door(modules: Modules, importer: str, use: Use) -> str | None:
    """Why this import is not allowed, and what to write; None where it is."""
    here, target = modules.folder(importer), use.target
    there = modules.folder(target)
    what = f" ({', '.join(use.names)})" if use.names else ""
    if _package(here) != _package(target):
        if modules.by_name[target].is_package:
            return None
        return (
            f"{target}{what} is a module of another package; import from a door of {there}, "
            "or let that door export the name"
        )
    if not modules.by_name[target].is_package:
        if there in (here, _package(here)):
            return None
        return (
            f"{target}{what} lies behind the door of {there}; import from {there}, "
            "and let its __init__.py export the name"
        )
    if target == _package(target):
        if not use.names:  # `import pkg`, for its __file__
            return None
        return f"imports its own package's face{what}; import from the room that has the name"
    if target == here and target != importer:
        return f"imports from the door of its own room{what}; import from the module that has it"
    return None


def _circles(edges: _Edges) -> list[Problem]:
    found = list(_circle_problems(edges, "folders"))
    between_rooms: _Edges = defaultdict(list)
    for (here, there), places in edges.items():
        if room_of(here) != room_of(there):
            between_rooms[room_of(here), room_of(there)] += places
    # A circle of folders on the top level would be told twice.
    return found or list(_circle_problems(between_rooms, "rooms, sub-rooms counted with them"))


def _circle_problems(edges: _Edges, what: str) -> Iterator[Problem]:
    for circle in cut_cycles(_graph(edges)):
        steps = list(pairwise(circle))
        path, line = edges[steps[0]][0].rsplit(":", 1)
        places = "; ".join(
            f"{there} is imported at {edges[here, there][0]}" for here, there in steps
        )
        yield _problem(
            path,
            f"circle of {what}: {' -> '.join(circle)} ({places}); move what both need into "
            "a third room below them, or pass it as an argument",
            int(line),
        )


def _graph(edges: Iterable[tuple[str, str]]) -> dict[str, set[str]]:
    graph: dict[str, set[str]] = defaultdict(set)
    for here, there in edges:
        graph[here].add(there)
    return dict(graph)


def _chains(modules: Modules) -> Iterator[Problem]:
    for chain in longest_chains(modules).values():
        if len(chain) > CHAIN_ROOMS:
            yield _problem(
                modules.by_name[chain[0]].path,
                f"chain of {len(chain)} rooms: {' -> '.join(chain)}; at most {CHAIN_ROOMS}: "
                "join two rooms, or pass something as an argument",
            )


def _longest_chain(start: str, graph: dict[str, set[str]], modules: Modules) -> list[str]:
    """The rooms on the longest way down; a module at the root is passed without being counted."""
    below = [_longest_chain(other, graph, modules) for other in sorted(graph.get(start, ()))]
    own = [start] if modules.by_name[start].is_package else []
    return own + max(below, key=len, default=[])


def _problem(path: str, message: str, line: int = 1) -> Problem:
    return Problem(path=path, line=line, message=message)
