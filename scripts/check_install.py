"""Prove that an environment holds a package's wheel, its declared siblings and none of the others.

Run with the environment's interpreter, outside the checkout; stdlib only:

    python check_install.py moe_pipeline --siblings comm_collectives --absent mesh_spmd gpu_alloc

Exits with a message when a package is imported from anywhere but site-packages, or when a sibling
that was not declared can be imported.
"""

import argparse
import importlib.util
import sys
import sysconfig
from pathlib import Path


def problems(present: list[str], absent: list[str]) -> list[str]:
    """What is wrong with this environment, a line each; empty when all is as it should be."""
    site_packages = {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")}
    found = []
    for name in present:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            found.append(f"{name} is not installed")
        elif not site_packages & set(Path(spec.origin).resolve().parents):
            found.append(f"{name} comes from {spec.origin}, not from a wheel in site-packages")
    for name in absent:
        spec = importlib.util.find_spec(name)
        if spec is not None:
            found.append(f"{name} is importable from {spec.origin} without being declared")
    return found


def main() -> int:
    """Parse the command line and print the problems."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("package", help="import name of the package under test")
    parser.add_argument("--siblings", nargs="*", default=[], help="import names that must be there")
    parser.add_argument("--absent", nargs="*", default=[], help="import names that must not be")
    arguments = parser.parse_args()
    found = problems([arguments.package, *arguments.siblings], arguments.absent)
    for line in found:
        print(f"check_install: {line}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
