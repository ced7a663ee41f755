"""Run every gate over the repository and print what is wrong, a line each.

python scripts/run_gates.py                         # all gates on the checkout
python scripts/run_gates.py --package mesh-spmd     # only what concerns this package
python scripts/run_gates.py --wheels dist           # the metadata of built wheels as well
"""

import argparse
import sys
import tomllib
from pathlib import Path

from claims.ledger import check_ledger
from gates.budgets import check_budgets, check_percentile
from gates.cycles import check_cycles
from gates.doors import check_doors, check_faces
from gates.duplicates import check_duplicates
from gates.floors import check_floors
from gates.habits import check_habits
from gates.lines import check_lines
from gates.mirror import check_mirror
from gates.missing import check_missing
from gates.pages import check_pages
from gates.repeats import check_repeats
from gates.rooms import check_rooms
from gates.source import Problem, read_sources
from gates.tracked import check_tracked, tracked_files
from gates.unreached import UNREACHED, check_unreached
from gates.wheels import check_wheels
from gates.words import GLOSSARY, check_spellings, check_words
from workspace import ROOT, Package, read_packages

Found = dict[str, list[Problem]]  # gate -> what it found


def run(root: Path, packages: tuple[Package, ...]) -> Found:
    """The problems found by each gate, by the gate's name."""
    folders = [p.folder / "src" for p in packages]
    sources = read_sources(folders, root=root)
    stubs = read_sources(folders, root=root, pattern="__init__.pyi")
    own = read_sources([root / "scripts"], root=root)
    callers = read_sources(_callers(root), root=root)
    settings = tomllib.loads((root / "pyproject.toml").read_text())
    return {
        "budgets": check_budgets([*sources, *own]),
        "95th percentile": check_percentile(sources),
        "import cycles": check_cycles(sources) + check_cycles(own),
        "duplicates": check_duplicates(sources) + check_duplicates(own),
        "rooms": check_rooms(sources, stubs),
        "doors": check_doors(sources, stubs),
        "faces": check_faces(stubs),
        "floors": check_floors(packages, sources, settings=settings),
        "tests of rooms": check_mirror(packages, root=root),
        "words": check_words(packages, sources, stubs, glossary=(root / GLOSSARY).read_text()),
        "spellings": check_spellings(sources),
        "pages": check_pages(packages, root=root),
        "habits": check_habits(sources),
        "repeats": check_repeats(sources),
        "unreached": check_unreached(sources, stubs, names=(root / UNREACHED).read_text()),
        "missing": check_missing(callers, sources, stubs),
        "lines": check_lines(packages, root=root),
        "tracked files": check_tracked(tracked_files(root), root=root),
        "claims ledger": check_ledger(root),
    }


def _callers(root: Path) -> list[Path]:
    """The folders of programs that import the packages, and are none of them."""
    tests = [*root.glob("packages/*/tests"), *root.glob("testing/*/*")]
    return [root / "benchmarks", root / "integration_tests", *sorted(tests)]


def only(found: Found, package: Package, *, root: Path) -> Found:
    """Those problems that stand in the package's files, or name one of them."""
    folder = f"{package.folder.relative_to(root).as_posix()}/"
    return {gate: [p for p in problems if folder in str(p)] for gate, problems in found.items()}


def main() -> int:
    """Print the problems of each gate; 1 when there are any."""
    packages = read_packages(ROOT)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--wheels", type=Path, help="folder of built wheels to check as well")
    parser.add_argument("--package", choices=[p.name for p in packages], help="only this package")
    arguments = parser.parse_args()
    found = run(ROOT, packages)
    if arguments.wheels is not None:
        versions = {p.name: p.version for p in packages}
        found["wheels"] = check_wheels(arguments.wheels, packages, versions=versions)
    for package in packages:
        if package.name == arguments.package:
            found = only(found, package, root=ROOT)
    for gate, problems in found.items():
        print(f"{gate}: {f'{len(problems)} problems' if problems else 'ok'}")
        for problem in problems:
            print(f"  {problem}")
    return 1 if any(found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
