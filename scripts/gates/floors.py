"""Each package has a contract of floors in the root pyproject.toml, which lists all of its rooms.

import-linter holds the order of the floors; a room that no contract lists would be held by nothing.
A package without rooms lists its files. The contract of a package with rooms may list modules of
its root as well.

    [[tool.importlinter.contracts]]
    name = "Rooms of moe_train"
    type = "layers"
    containers = ["moe_train"]
    layers = ["jobs", "training | report", "config"]
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gates.imports import Modules
from gates.rooms import folder_edges, room_of
from gates.source import Problem, Source
from workspace import Package

_PATH = "pyproject.toml"


def check_floors(
    packages: Sequence[Package], sources: Sequence[Source], *, settings: Mapping[str, Any]
) -> list[Problem]:
    """Packages without their contract, and contracts that do not list each room once.

    `settings` is the root pyproject.toml.
    """
    contracts = settings.get("tool", {}).get("importlinter", {}).get("contracts", [])
    modules = Modules.of(sources)
    return [
        Problem(path=_PATH, line=1, message=f"{message} (packages/{package.folder.name}/)")
        for package in packages
        for message in _messages(package.import_name, contracts, modules)
    ]


def _messages(package: str, contracts: list[dict[str, Any]], modules: Modules) -> Iterator[str]:
    inside = {m.split(".")[1] for m in modules.by_name if m.startswith(f"{package}.")}
    rooms = {name for name in inside if modules.by_name[f"{package}.{name}"].is_package}
    wanted = rooms or inside
    title = f"{'Rooms' if rooms else 'Files'} of {package}"
    found = [c for c in contracts if c.get("containers") == [package] and c["type"] == "layers"]
    if len(found) != 1 or found[0]["name"] != title:
        yield (
            f'{len(found)} contracts of type layers with containers = ["{package}"]; write exactly '
            f'one, name = "{title}", such as layers = {_today(package, wanted, modules)}'
        )
        return
    listed = [
        name.strip(" ()") for layer in found[0]["layers"] for name in re.split(r"[|:]", layer)
    ]
    for name in sorted(wanted - set(listed)):
        yield f'"{title}" does not list `{name}`; put it on its floor'
    for name in sorted(set(listed) - inside):
        yield f'"{title}" lists `{name}`, which is not there; remove it'
    for name in sorted({name for name in listed if listed.count(name) > 1}):
        yield f'"{title}" lists `{name}` twice'
    if found[0].get("ignore_imports"):
        yield f'"{title}" ignores imports; no import may reach up'


def _today(package: str, names: set[str], modules: Modules) -> str:
    """The floors that the imports of today would allow, from the top down."""
    below: dict[str, set[str]] = {name: set() for name in names}
    for here, there in folder_edges(modules):
        upper, lower = room_of(here).split(".")[1], room_of(there).split(".")[1]
        if here.startswith(f"{package}.") and upper != lower and {upper, lower} <= names:
            below[upper].add(lower)
    floors: list[list[str]] = []
    while below:
        floor = sorted(name for name, lower in below.items() if not lower & set(below))
        if not floor:
            return "[...] once the circles are gone"
        floors.insert(0, floor)
        below = {name: lower for name, lower in below.items() if name not in floor}
    return json.dumps([" | ".join(floor) for floor in floors])
