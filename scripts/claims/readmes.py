"""The figures in the READMEs and in CLAIMS.md: copied from the results by program, never by hand.

Between `<!-- figures:begin -->` and `<!-- figures:end -->` in a package's README.md stands a table
of the package's figures. What tests show ("N tests pass"), and the claims of the repository, stand
in benchmarks/CLAIMS.md, which is written as a whole. `check_readmes` says which page differs from
what the ledger and the results would give, so that a figure cannot outlive its measurement.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from claims.ledger import REPOSITORY, Claim
from claims.runner import NOT_HERE
from gates.source import Problem
from workspace import Package

PAGE = Path("benchmarks", "CLAIMS.md")
TESTS = "tests"  # the unit of a claim that tests show
BEGIN = "<!-- figures:begin -->"
END = "<!-- figures:end -->"
_SECTION = re.compile(re.escape(BEGIN) + r".*?" + re.escape(END), re.DOTALL)

Entries = dict[str, dict[str, object]]


def write_readmes(
    packages: Sequence[Package], claims: Sequence[Claim], entries: Entries, *, root: Path
) -> list[Path]:
    """Bring every README and CLAIMS.md up to date; returns the files that changed."""
    texts = {}
    for package in packages:
        file = package.folder / "README.md"
        texts[file] = fill(file.read_text(), _figures(package, claims), entries)
    texts[root / PAGE] = render_page(packages, claims, entries)
    changed = [file for file, text in texts.items() if not _is(file, text)]
    for file in changed:
        file.write_text(texts[file])
    return changed


def check_readmes(
    packages: Sequence[Package], claims: Sequence[Claim], entries: Entries, *, root: Path
) -> list[Problem]:
    """The pages whose figures are missing or differ from the results."""
    outdated = "figures are out of date; run `uv run nox -s claims -- --write-readmes`"
    problems = []
    for package in packages:
        text = (package.folder / "README.md").read_text()
        own = _figures(package, claims)
        path = f"packages/{package.folder.name}/README.md"
        if own and not _SECTION.search(text):
            message = f"no figures section; put {BEGIN} and {END} where the table belongs"
            problems.append(Problem(path=path, line=1, message=message))
        elif fill(text, own, entries) != text:
            problems.append(Problem(path=path, line=1, message=outdated))
    if not _is(root / PAGE, render_page(packages, claims, entries)):
        problems.append(Problem(path=PAGE.as_posix(), line=1, message=outdated))
    return problems


def _figures(package: Package, claims: Sequence[Claim]) -> list[Claim]:
    return [c for c in claims if c.package == package.name and c.unit != TESTS]


def _is(file: Path, text: str) -> bool:
    return file.is_file() and file.read_text() == text


def render_page(packages: Sequence[Package], claims: Sequence[Claim], entries: Entries) -> str:
    """CLAIMS.md: what tests show, package by package, and what the repository claims."""
    parts = [
        "# What tests show\n\nWritten by `uv run nox -s claims -- --write-readmes` from "
        "[claims.toml](claims.toml) and the results; not by hand. Figures of speed, memory and "
        "size stand in each package's README.\n"
    ]
    for name in (*(p.name for p in packages), REPOSITORY):
        own = [c for c in claims if c.package == name and (c.unit == TESTS or name == REPOSITORY)]
        if own:
            parts.append(f"## {name}\n\n{_page_table(own, entries)}\n")
    return "\n".join(parts)


def _page_table(claims: Sequence[Claim], entries: Entries) -> str:
    rows = ["| claim | shown by | limit | measured | |", "| --- | --- | --- | --- | --- |"]
    for claim in claims:
        measured, verdict = _measured(claim, entries)
        shown = f"`{claim.command}`"
        rows.append(_row(claim.statement, shown, f"{claim.limit} {claim.unit}", measured, verdict))
    return "\n".join([*rows, "", *_closing(claims, entries)])


def fill(text: str, claims: Sequence[Claim], entries: Entries) -> str:
    """The README's text with its figures section replaced; unchanged when it has none."""
    section = f"{BEGIN}\n{render(claims, entries)}\n{END}"
    return _SECTION.sub(lambda _: section, text)


def render(claims: Sequence[Claim], entries: Entries) -> str:
    """The table of the claims, and one line for each machine that measured some of them."""
    if not claims:
        return "No figure is claimed yet."
    rows = ["| claim | limit | against | measured | |", "| --- | --- | --- | --- | --- |"]
    for claim in claims:
        measured, verdict = _measured(claim, entries)
        limit = f"{claim.limit} {claim.unit}"
        rows.append(_row(claim.statement, limit, claim.peer, measured, verdict))
    more = f"What tests show stands in [{PAGE}](../../{PAGE})."
    return "\n".join([*rows, "", *_closing(claims, entries), more])


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _closing(claims: Sequence[Claim], entries: Entries) -> list[str]:
    """One line for each machine that measured some of the claims, and how to measure again."""
    sources = sorted({_source(entries[c.id]) for c in claims if c.id in entries})
    return [*sources, f"Measure again: `uv run nox -s claims -- {claims[0].package}`."]


def _measured(claim: Claim, entries: Entries) -> tuple[str, str]:
    entry = entries.get(claim.id)
    if entry is None:
        return "", "needs a GPU, not measured yet" if claim.gpu else "not measured yet"
    text = f"{number(entry['value'])} {claim.unit}"
    if "low" in entry and "high" in entry:
        text += f" ({number(entry['low'])} to {number(entry['high'])})"
    verdict = str(entry["verdict"])
    return text, verdict if verdict != NOT_HERE else ""


def number(value: object) -> str:
    """Three significant digits; whole counts in full."""
    if not isinstance(value, int | float):
        return str(value)
    return f"{value:.0f}" if value == int(value) and abs(value) < 1e6 else f"{value:.3g}"


def _source(entry: dict[str, object]) -> str:
    machine, versions = entry["machine"], entry["versions"]
    if not isinstance(machine, dict) or not isinstance(versions, dict):
        raise TypeError(f"result {entry['id']}: `machine` and `versions` must be tables")
    place = machine.get("gpu") or f"{machine['cores']} cores of {machine['processor']}"
    return (
        f"Measured on {entry['date']} on {place}, with Python {versions.get('python')} and "
        f"torch {versions.get('torch')}.  "
    )
