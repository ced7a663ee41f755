"""Before a package is published: do tag, version, changelog and wheel tell the same story?

python scripts/release.py name mesh-spmd-v0.1.0         # prints mesh-spmd
python scripts/release.py check mesh-spmd-v0.1.0 dist   # non-zero with a line for each problem
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from gates.wheels import check_wheels
from workspace import Package, read_packages

_TAG = re.compile(r"(?P<name>[a-z][a-z0-9-]*)-v(?P<version>[0-9]+(\.[0-9]+)*([a-z0-9.]+)?)")


def tagged_package(tag: str, packages: Sequence[Package]) -> tuple[Package, str]:
    """The package that a tag names, and the version that it names.

    Raises:
        ValueError: the tag is not `<package>-v<version>`, or names no package of ours.
    """
    match = _TAG.fullmatch(tag)
    by_name = {p.name: p for p in packages}
    if match is None or match["name"] not in by_name:
        raise ValueError(
            f"tag {tag!r} names no package; write <package>-v<version> with a package of "
            f"{', '.join(by_name)}"
        )
    return by_name[match["name"]], match["version"]


def release_messages(tag: str, dist: Path, packages: Sequence[Package]) -> list[str]:
    """What disagrees, a line each."""
    package, version = tagged_package(tag, packages)
    found = []
    if version != package.version:
        found.append(f"tag {tag} says {version}, pyproject.toml says {package.version}")
    changelog = (package.folder / "CHANGELOG.md").read_text()
    dated = rf"^## {re.escape(version)} \([0-9]{{4}}-[0-9]{{2}}-[0-9]{{2}}\)"
    if not re.search(dated, changelog, re.MULTILINE):
        found.append(f"CHANGELOG.md of {package.name} has no heading `## {version} (<date>)`")
    others = [f.name for f in dist.iterdir() if not f.name.startswith(f"{package.import_name}-")]
    if others:
        found.append(f"{dist} holds other files too: {', '.join(sorted(others))}")
    problems = check_wheels(dist, [package], versions={p.name: p.version for p in packages})
    return found + [str(problem) for problem in problems]


def main() -> int:
    """Print the package's name, or what is wrong with the release."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    name = commands.add_parser("name", help="print the package that a tag names")
    check = commands.add_parser("check", help="compare tag, version, changelog and wheel")
    for command in (name, check):
        command.add_argument("tag", help="as mesh-spmd-v0.1.0")
    check.add_argument("dist", type=Path, help="folder that holds the built distributions")
    arguments = parser.parse_args()
    packages = read_packages()
    try:
        if arguments.command == "name":
            print(tagged_package(arguments.tag, packages)[0].name)
            return 0
        messages = release_messages(arguments.tag, arguments.dist, packages)
    except ValueError as error:
        messages = [str(error)]
    for message in messages:
        print(f"release: {message}", file=sys.stderr)
    return 1 if messages else 0


if __name__ == "__main__":
    sys.exit(main())
