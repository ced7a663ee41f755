"""What a built wheel must say of itself, read from the wheel and not from the source tree.

uv ignores version bounds between workspace members, and a published wheel without them would meet
whatever version of a sibling is newest. So the bounds are written by hand in each pyproject.toml
and held here: a floor and a ceiling, and the sibling's present version between them.
"""

import configparser
import email
import email.message
import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from gates.source import Problem
from workspace import Package, requirement_name

_FLOOR = re.compile(r">=\s*([0-9][0-9.]*)")
_CEILING = re.compile(r"<\s*([0-9][0-9.]*)")


def check_wheels(
    folder: Path, packages: Sequence[Package], *, versions: Mapping[str, str]
) -> list[Problem]:
    """Every package has one wheel in the folder, with right metadata, command and files.

    `versions` are the present versions of all packages of the workspace, by name.
    """
    problems = []
    for package in packages:
        pattern = f"{package.import_name}-{package.version}-*.whl"
        wheels = sorted(folder.glob(pattern))
        if len(wheels) != 1:
            message = f"{len(wheels)} wheels match {pattern}; build exactly one"
            problems.append(Problem(path=package.name, line=1, message=message))
            continue
        problems += [
            Problem(path=wheels[0].name, line=1, message=message)
            for message in _wheel_messages(wheels[0], package, versions)
        ]
    return problems


def _wheel_messages(wheel: Path, package: Package, versions: Mapping[str, str]) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        info = f"{package.import_name}-{package.version}.dist-info"
        metadata = email.message_from_bytes(archive.read(f"{info}/METADATA"))
        entry_points = configparser.ConfigParser()
        if f"{info}/entry_points.txt" in names:
            entry_points.read_string(archive.read(f"{info}/entry_points.txt").decode())
    found = sibling_messages(metadata, versions)
    if metadata["License-Expression"] != "Apache-2.0":
        found.append(f"License-Expression is {metadata['License-Expression']}, not Apache-2.0")
    command = f"{package.import_name}.cli:main"
    if entry_points.get("console_scripts", package.name, fallback=None) != command:
        found.append(f"no command {package.name} = {command}")
    if f"{package.import_name}/py.typed" not in names:
        found.append(f"{package.import_name}/py.typed is missing")
    foreign = [n for n in names if n.split("/")[0] not in (package.import_name, info)]
    if foreign:
        found.append(f"files outside {package.import_name}/: {', '.join(foreign[:3])}")
    return found


def sibling_messages(metadata: email.message.Message, versions: Mapping[str, str]) -> list[str]:
    """What is wrong with the bounds on siblings, given every package's present version."""
    found = []
    for requirement in metadata.get_all("Requires-Dist", []):
        name = requirement_name(requirement)
        if name not in versions:
            continue
        floor, ceiling = _FLOOR.search(requirement), _CEILING.search(requirement)
        if floor is None or ceiling is None:
            found.append(f"`{requirement}` needs a floor and a ceiling, such as {name}>=0.1,<0.2")
        elif not _parts(floor[1]) <= _parts(versions[name]) < _parts(ceiling[1]):
            found.append(f"`{requirement}` leaves out the present version {versions[name]}")
    return found


def _parts(version: str) -> tuple[int, ...]:
    numbers = [int(n) for n in version.strip(".").split(".")]
    while len(numbers) > 1 and numbers[-1] == 0:  # 0.2 and 0.2.0 are the same version
        numbers.pop()
    return tuple(numbers)
