"""The figures in the READMEs: copied from the results by program, never by hand.

Between `<!-- figures:begin -->` and `<!-- figures:end -->` in a package's README.md stands a table
of the package's claims. `check_readmes` says which README differs from what the ledger and the
results would give, so that a figure cannot outlive its measurement.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from claims.ledger import Claim
from claims.runner import NOT_HERE
from gates.source import Problem
from workspace import Package

BEGIN = "<!-- figures:begin -->"
END = "<!-- figures:end -->"
_SECTION = re.compile(re.escape(BEGIN) + r".*?" + re.escape(END), re.DOTALL)

Entries = dict[str, dict[str, object]]


def write_readmes(
    packages: Sequence[Package], claims: Sequence[Claim], entries: Entries
) -> list[Path]:
    """Bring every README up to date; returns the files that changed."""
    changed = []
    for package in packages:
        file = package.folder / "README.md"
        text = file.read_text()
        updated = fill(text, [c for c in claims if c.package == package.name], entries)
        if updated != text:
            file.write_text(updated)
            changed.append(file)
    return changed


def check_readmes(
    packages: Sequence[Package], claims: Sequence[Claim], entries: Entries
) -> list[Problem]:
    """The READMEs whose figures are missing or differ from the results."""
    problems = []
    for package in packages:
        text = (package.folder / "README.md").read_text()
        own = [c for c in claims if c.package == package.name]
        path = f"packages/{package.folder.name}/README.md"
        if own and not _SECTION.search(text):
            message = f"no figures section; put {BEGIN} and {END} where the table belongs"
            problems.append(Problem(path=path, line=1, message=message))
        elif fill(text, own, entries) != text:
            message = "figures are out of date; run `uv run nox -s claims -- --write-readmes`"
            problems.append(Problem(path=path, line=1, message=message))
    return problems


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
        cells = (claim.statement, f"{claim.limit} {claim.unit}", claim.peer, measured, verdict)
        rows.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    sources = sorted({_source(entries[c.id]) for c in claims if c.id in entries})
    return "\n".join([*rows, "", *sources, f"Measure again: `{_command(claims)}`."])


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


def _command(claims: Sequence[Claim]) -> str:
    return f"uv run nox -s claims -- {claims[0].package}"
