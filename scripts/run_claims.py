"""Measure what the project claims, and say what holds.

python scripts/run_claims.py                        # every claim that this machine can measure
python scripts/run_claims.py comm-collectives       # the claims of one package
python scripts/run_claims.py --only ID [ID ...]     # some claims
python scripts/run_claims.py --gpu                  # the GPU claims, into gpu-<card>.json
python scripts/run_claims.py --gpu --list           # or only name them
python scripts/run_claims.py --write-readmes        # copy the results into the pages
python scripts/run_claims.py --check-readmes        # or only say which are out of date
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from claims.ledger import Claim, read_ledger
from claims.readmes import check_readmes, number, write_readmes
from claims.results import RESULTS, gpu_name, read_entries, write_results
from claims.runner import FAILED, FALLS_SHORT, NOT_HERE, Outcome, measure
from workspace import ROOT, read_packages


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print and record; 1 when a claim falls short or cannot be measured as it should."""
    arguments = _parser().parse_args(argv)
    claims = read_ledger(ROOT)
    if arguments.write_readmes or arguments.check_readmes:
        return _readmes(claims, write=arguments.write_readmes)
    chosen = _choose(claims, arguments)
    if not chosen and not arguments.gpu:
        print("claims: no claim matches; see benchmarks/claims.toml", file=sys.stderr)
        return 2
    if arguments.list:
        print(*(f"{claim.package}: {claim.id}" for claim in chosen), sep="\n")
        return 0
    outcomes = measure(chosen, root=ROOT, has_gpu=gpu_name() is not None)
    _record(outcomes, arguments.gpu_tests)
    print(table(outcomes))
    for outcome in outcomes:
        if outcome.reason:
            print(f"\n{outcome.claim.id}: {outcome.reason}")
    return 1 if any(o.verdict in (FAILED, FALLS_SHORT) for o in outcomes) else 0


def table(outcomes: Sequence[Outcome]) -> str:
    """One row a claim: id, limit, measured, verdict."""
    rows: list[tuple[str, ...]] = [("claim", "limit", "measured", "verdict")]
    for outcome in outcomes:
        value = outcome.figure.get("value")
        measured = "" if value is None else f"{number(value)} {outcome.claim.unit}"
        limit = f"{outcome.claim.limit} {outcome.claim.unit}"
        rows.append((outcome.claim.id, limit, measured, outcome.verdict))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    rows.insert(1, tuple("-" * w for w in widths))
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("packages", nargs="*", help="names of packages; all when none is given")
    parser.add_argument("--only", nargs="+", default=[], metavar="ID", help="ids of claims")
    parser.add_argument("--gpu", action="store_true", help="the GPU claims alone")
    parser.add_argument("--list", action="store_true", help="name the claims, measure nothing")
    parser.add_argument(
        "--gpu-tests", type=Path, metavar="FILE", help="report of the GPU tests, to be kept as well"
    )
    parser.add_argument("--write-readmes", action="store_true", help="fill in the READMEs")
    parser.add_argument("--check-readmes", action="store_true", help="compare the READMEs")
    return parser


def _choose(claims: Sequence[Claim], arguments: argparse.Namespace) -> list[Claim]:
    known = {c.package for c in claims} | {p.name for p in read_packages()}
    unknown = set(arguments.packages) - known
    unknown |= set(arguments.only) - {c.id for c in claims}
    if unknown:
        names = ", ".join(sorted(unknown))
        raise SystemExit(f"claims: unknown: {names}; see benchmarks/claims.toml")
    return [
        c
        for c in claims
        if (not arguments.packages or c.package in arguments.packages)
        and (not arguments.only or c.id in arguments.only)
        and (not arguments.gpu or c.gpu)
    ]


def _record(outcomes: Sequence[Outcome], gpu_tests: Path | None) -> None:
    """GPU figures into the card's file, all others into their package's file."""
    card = re.sub(r"[^a-z0-9]+", "-", (gpu_name() or "none").lower()).strip("-")
    by_file: dict[str, list[Outcome]] = {f"gpu-{card}": []} if gpu_tests is not None else {}
    for outcome in outcomes:
        if outcome.verdict != NOT_HERE:
            name = f"gpu-{card}" if outcome.claim.gpu else outcome.claim.package
            by_file.setdefault(name, []).append(outcome)
    for name, members in by_file.items():
        tests = None
        if gpu_tests is not None and name == f"gpu-{card}":
            tests = json.loads(gpu_tests.read_text())
        write_results(RESULTS / f"{name}.json", members, tests=tests)


def _readmes(claims: Sequence[Claim], *, write: bool) -> int:
    packages = read_packages()
    entries = read_entries(RESULTS)
    if write:
        for file in write_readmes(packages, claims, entries, root=ROOT):
            print(f"claims: wrote {file.relative_to(ROOT)}")
    problems = check_readmes(packages, claims, entries, root=ROOT)
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
