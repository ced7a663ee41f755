"""Run every gate over the repository and print what is wrong, a line each.

python scripts/run_gates.py                     # all gates on the checkout
python scripts/run_gates.py --wheels dist       # the metadata of built wheels as well
"""

import argparse
import sys
from pathlib import Path

from claims.ledger import check_ledger
from gates.budgets import check_budgets, check_percentile
from gates.cycles import check_cycles
from gates.duplicates import check_duplicates
from gates.source import Problem, read_sources
from gates.tracked import check_tracked, tracked_files
from gates.wheels import check_wheels
from workspace import ROOT, read_packages


def run(root: Path, wheels: Path | None) -> dict[str, list[Problem]]:
    """The problems found by each gate, by the gate's name."""
    packages = read_packages(root)
    sources = read_sources([p.folder / "src" for p in packages], root=root)
    own = read_sources([root / "scripts"], root=root)
    found = {
        "budgets": check_budgets([*sources, *own]),
        "95th percentile": check_percentile(sources),
        "import cycles": check_cycles(sources) + check_cycles(own),
        "duplicates": check_duplicates(sources) + check_duplicates(own),
        "tracked files": check_tracked(tracked_files(root), root=root),
        "claims ledger": check_ledger(root),
    }
    if wheels is not None:
        found["wheels"] = check_wheels(
            wheels, packages, versions={p.name: p.version for p in packages}
        )
    return found


def main() -> int:
    """Print the problems of each gate; 1 when there are any."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--wheels", type=Path, help="folder of built wheels to check as well")
    found = run(ROOT, parser.parse_args().wheels)
    for gate, problems in found.items():
        print(f"{gate}: {f'{len(problems)} problems' if problems else 'ok'}")
        for problem in problems:
            print(f"  {problem}")
    return 1 if any(found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
