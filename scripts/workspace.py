"""The packages of this workspace, read from their pyproject.toml files.

One place answers "which packages are there, and who depends on whom", so that nox, the gates, the
changed-package matrix and the release check cannot disagree.

    >>> [p.name for p in read_packages(root) if "comm-collectives" in p.siblings]
    ['moe-pipeline', 'moe-train']
"""

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """One published package of the workspace.

    `siblings` are the names of the workspace packages that it depends on, directly or through
    another sibling, in alphabetical order.
    """

    name: str
    version: str
    folder: Path
    siblings: tuple[str, ...]

    @property
    def import_name(self) -> str:
        """The name under which Python imports it."""
        return self.name.replace("-", "_")


def read_packages(root: Path = ROOT) -> tuple[Package, ...]:
    """Every package under `packages/`, in alphabetical order."""
    projects = {}
    for file in sorted(root.glob("packages/*/pyproject.toml")):
        project = tomllib.loads(file.read_text())["project"]
        projects[project["name"]] = (file.parent, project)
    direct = {
        name: {requirement_name(line) for line in project.get("dependencies", ())} & set(projects)
        for name, (_, project) in projects.items()
    }
    return tuple(
        Package(
            name=name,
            version=project["version"],
            folder=folder,
            siblings=tuple(sorted(_closure(name, direct))),
        )
        for name, (folder, project) in projects.items()
    )


def requirement_name(requirement: str) -> str:
    """The distribution name at the start of a requirement: `comm-collectives>=0.1` -> its name."""
    match = re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", requirement.strip())
    if match is None:
        raise ValueError(f"not a requirement: {requirement!r}; expected `name>=version`")
    return re.sub(r"[-_.]+", "-", match.group()).lower()


def _closure(name: str, direct: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = list(direct[name])
    while waiting:
        sibling = waiting.pop()
        if sibling not in found:
            found.add(sibling)
            waiting.extend(direct[sibling])
    return found


def gpu_test_files(root: Path = ROOT) -> tuple[Path, ...]:
    """Every test file of the packages that holds a test marked `gpu`."""
    found = sorted(root.glob("packages/*/tests/**/test_*.py"))
    return tuple(file for file in found if re.search(r"mark\.gpu\b", file.read_text()))
