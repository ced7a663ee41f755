"""Which packages a change touches, their dependants included: the matrix of the CI job.

A change outside `packages/` that every package is tested with (the lock, the noxfile, test helpers,
scripts, workflows) touches all of them; documents and benchmarks touch none.

    python scripts/changed.py --base origin/main        # prints ["comm-collectives", ...]
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Sequence

from workspace import ROOT, Package, read_packages

_TOUCHES_NOTHING = ("docs/", "benchmarks/", "examples/", "integration_tests/")
_TEXTS = (".md", "LICENSE", ".gitignore")


def changed_packages(files: Iterable[str], packages: Sequence[Package]) -> list[str]:
    """Names of the packages to test, given the changed paths relative to the root."""
    folders = {f"packages/{p.folder.name}/": p for p in packages}
    touched: set[str] = set()
    for file in files:
        owner = next((p for folder, p in folders.items() if file.startswith(folder)), None)
        if owner is not None:
            touched.add(owner.name)
        elif not file.startswith(_TOUCHES_NOTHING) and not file.endswith(_TEXTS):
            return [p.name for p in packages]
    return [p.name for p in packages if touched & {p.name, *p.siblings}]


def changed_files(base: str) -> list[str] | None:
    """Paths that differ between the merge base with `base` and HEAD; None when git cannot tell."""
    command = ["git", "diff", "--name-only", "-z", f"{base}...HEAD"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if found.returncode != 0:
        print(f"changed: {found.stderr.strip()}; testing every package", file=sys.stderr)
        return None
    return [name for name in found.stdout.split("\0") if name]


def main() -> int:
    """Print the names as a JSON list."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--base", default="", help="commit to compare with; all packages without")
    base = parser.parse_args().base
    packages = read_packages()
    # A new branch's push event names forty zeros as the commit before it.
    files = changed_files(base) if base.strip("0") else None
    names = [p.name for p in packages] if files is None else changed_packages(files, packages)
    print(json.dumps(names))
    return 0


if __name__ == "__main__":
    sys.exit(main())
