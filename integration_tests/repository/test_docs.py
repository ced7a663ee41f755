"""docs/architecture.md is held to the code: its diagram, the files it names; and all our links."""

import re
from pathlib import Path

import pytest

from workspace import ROOT, read_packages

ARCHITECTURE = ROOT / "docs" / "architecture.md"
PACKAGES = read_packages()
TEXTS = [
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/**/*.md"),
    *ROOT.glob("packages/*/*.md"),
    *ROOT.glob("examples/**/*.md"),
]


def test_the_diagram_shows_the_declared_dependencies() -> None:
    diagram = ARCHITECTURE.read_text().partition("```mermaid")[2].partition("```")[0]
    shown = set(re.findall(r"^\s*(\S+) --> (\S+)$", diagram, re.MULTILINE))
    assert shown == {(p.name, sibling) for p in PACKAGES for sibling in p.siblings}


def test_every_file_that_the_architecture_names_is_there() -> None:
    path = r"`([\w./-]+\.(?:py|toml|sh|lock)|\w[\w.-]*(?:/[\w.-]+)+/?)`"
    named = re.findall(path, ARCHITECTURE.read_text())
    sources = [f for p in PACKAGES for f in (p.folder / "src").rglob("*.py")]
    missing = [
        name
        for name in named
        if not (ROOT / name).exists() and not any(f.match(f"*/{name}") for f in sources)
    ]
    assert len(named) > 20
    assert missing == []


def test_every_test_that_devicetest_names_for_a_finding_is_there() -> None:
    text = (ROOT / "testing/devicetest/README.md").read_text()
    named = re.findall(r"`([\w./-]+\.py)::(test_\w+)`", text)
    missing = [n for n in named if f"def {n[1]}(" not in (ROOT / n[0]).read_text()]
    assert len(named) == 6
    assert missing == []


@pytest.mark.parametrize("file", TEXTS, ids=lambda f: f.relative_to(ROOT).as_posix())
def test_every_relative_link_leads_somewhere(file: Path) -> None:
    text = re.sub(r"```.*?```", "", file.read_text(), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    broken = [
        link for link in links if "://" not in link and not (file.parent / link).resolve().exists()
    ]
    assert broken == []
