"""The ledger, the runner, the results and the READMEs of the claims."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from claims.ledger import Claim, check_ledger, read_ledger
from claims.readmes import BEGIN, END, check_readmes, fill, write_readmes
from claims.results import describe_machine, read_entries, versions, write_results
from claims.runner import (
    FAILED,
    FALLS_SHORT,
    HOLDS,
    NOT_HERE,
    Outcome,
    judge,
    measure,
    read_figures,
)
from gates.source import as_text
from workspace import ROOT, Package, read_packages

ENTRY = """\
[[claim]]
id = "{id}"
package = "a-b"
statement = "It is fast."
command = "python benchmarks/fast.py"
figure = "ratio"
unit = "x"
limit = "<= 1.05"
peer = "the other"
gpu = false
"""
CLAIM = Claim(
    id="fast",
    package="a-b",
    statement="It is fast.",
    command="python benchmarks/fast.py",
    figure="ratio",
    unit="x",
    limit="<= 1.05",
    peer="the other",
    gpu=False,
)
LINE = '{"figure": "ratio", "value": 1.01, "unit": "x", "low": 0.9, "high": 1.2, "n": 9}'


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A workspace of one package with one benchmark and one test."""
    package = tmp_path / "packages" / "a-b"
    (package / "tests").mkdir(parents=True)
    (package / "pyproject.toml").write_text('[project]\nname = "a-b"\nversion = "0.1.0"\n')
    (package / "README.md").write_text(f"# a-b\n\n{BEGIN}\nold\n{END}\n\nrest\n")
    (package / "tests" / "test_x.py").write_text("def test_one(): pass\ndef test_two(): pass\n")
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "fast.py").write_text(f"print('noise')\nprint('''{LINE}''')\n")
    (tmp_path / "benchmarks" / "claims.toml").write_text(ENTRY.format(id="fast"))
    return tmp_path


def ledger_problems(root: Path, text: str) -> str:
    (root / "benchmarks" / "claims.toml").write_text(text)
    return as_text(check_ledger(root))


def test_a_good_ledger_has_no_problem_and_is_read(root: Path) -> None:
    assert check_ledger(root) == []
    assert read_ledger(root) == [CLAIM]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('peer = "the other"\n', "", "key `peer` is missing"),
        ("gpu = false", 'gpu = "no"', "expected a bool"),
        ("gpu = false", "gpu = false\ncolour = 1", "unknown key `colour`"),
        ('"<= 1.05"', '"about 1"', "write it as `<= 1.05`"),
        ('"a-b"', '"c-d"', "package 'c-d' is none of a-b, repository"),
        ("benchmarks/fast.py", "benchmarks/slow.py", "benchmarks/slow.py does not exist"),
        ("python benchmarks", "make benchmarks", "neither `python <file>` nor `pytest <test>`"),
        ('"It is fast."', '""', "`statement` is empty"),
        (
            "python benchmarks/fast.py",
            "pytest packages/a-b/tests/test_x.py::test_one",
            "a test's figure is `passed`",
        ),
        (
            "python benchmarks/fast.py",
            "pytest packages/a-b/tests/test_x.py::test_three",
            "has no test test_three",
        ),
    ],
)
def test_a_bad_entry_is_found(root: Path, old: str, new: str, message: str) -> None:
    assert message in ledger_problems(root, ENTRY.format(id="fast").replace(old, new))


def test_an_id_that_stands_twice_is_found(root: Path) -> None:
    assert "the id stands twice" in ledger_problems(root, ENTRY.format(id="fast") * 2)


@pytest.mark.parametrize(
    ("limit", "value", "holds"),
    [
        ("<= 1.05", 1.05, True),
        ("< 0.3", 0.3, False),
        (">= 1", 1, True),
        ("> 1e-6", 1e-6, False),
        ("<= 1.05", math.nan, False),
    ],
)
def test_a_limit_is_compared_exactly(limit: str, value: float, holds: bool) -> None:
    assert replace(CLAIM, limit=limit).holds(value) is holds


def test_figures_are_read_from_json_lines_and_from_pytest() -> None:
    output = f"{{broken\n{LINE}\n=== 12 passed, 1 skipped in 3.2s ==="
    figures = read_figures(output)
    assert figures["ratio"] == {"value": 1.01, "low": 0.9, "high": 1.2, "n": 9}
    assert figures["passed"] == {"value": 12}


def test_a_command_is_run_once_and_all_its_claims_are_judged(root: Path) -> None:
    strict = replace(CLAIM, id="faster", limit="<= 1")
    on_gpu = replace(CLAIM, id="gpu", gpu=True)
    outcomes = measure([CLAIM, strict, on_gpu], root=root, has_gpu=False)
    assert [o.verdict for o in outcomes] == [HOLDS, FALLS_SHORT, NOT_HERE]


def test_a_test_is_measured_by_what_passed(root: Path) -> None:
    command = "pytest packages/a-b/tests/test_x.py"
    claim = replace(CLAIM, command=command, figure="passed", limit=">= 2", unit="tests")
    (outcome,) = measure([claim], root=root, has_gpu=False)
    assert (outcome.verdict, outcome.figure["value"]) == (HOLDS, 2)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (f"print('''{LINE}''')\nraise SystemExit(3)", "exit status 3"),
        ("print(1)", "printed no figure `ratio`"),
        ("import time; time.sleep(60)", "still running after 1 s"),
    ],
)
def test_a_command_that_fails_is_no_measurement(root: Path, code: str, reason: str) -> None:
    (root / "benchmarks" / "fast.py").write_text(code)
    (outcome,) = measure([replace(CLAIM, timeout_s=1)], root=root, has_gpu=False)
    assert outcome.verdict == FAILED
    assert reason in outcome.reason


@pytest.mark.parametrize(("status", "value"), [(0, 2), (3, 1), (0, 1)])
def test_of_a_claim_that_does_not_hold_the_error_stream_is_kept(
    root: Path, status: int, value: int
) -> None:
    line = json.dumps({"figure": CLAIM.figure, "value": value})
    code = f"import sys\nprint('seed 7 lost', file=sys.stderr)\nprint('{line}')\nsys.exit({status})"
    (root / "benchmarks" / "fast.py").write_text(code)
    (outcome,) = measure([CLAIM], root=root, has_gpu=False)
    assert ("seed 7 lost" in outcome.reason) == (outcome.verdict != HOLDS)
    assert (outcome.verdict == HOLDS) == (status == 0 and value == 1)


def test_results_say_what_was_measured_on_what(tmp_path: Path) -> None:
    file = tmp_path / "a-b.json"
    figure = {"value": 1.01, "low": 0.9, "high": 1.2, "n": 9.0}
    write_results(file, [Outcome(claim=CLAIM, verdict=HOLDS, figure=figure)])
    other = replace(CLAIM, id="other")
    write_results(file, [Outcome(claim=other, verdict=FALLS_SHORT, figure={"value": 2.0})])
    entries = read_entries(tmp_path)
    assert entries["fast"]["value"] == 1.01 and entries["fast"]["verdict"] == HOLDS
    assert entries["other"]["verdict"] == FALLS_SHORT
    assert json.loads(file.read_text())["versions"].keys() >= {"python", "torch", "mesh-spmd"}


def test_a_claim_that_fails_to_run_loses_its_earlier_result(tmp_path: Path) -> None:
    file = tmp_path / "a-b.json"
    write_results(file, [Outcome(claim=CLAIM, verdict=HOLDS, figure={"value": 1.0})])
    write_results(file, [Outcome(claim=CLAIM, verdict=FAILED, reason="exit status 1")])
    assert read_entries(tmp_path) == {}


def test_a_result_does_not_identify_the_machine() -> None:
    text = json.dumps(describe_machine() | versions())
    for private in (Path("/etc/hostname").read_text().strip(), str(Path.home()), str(Path.cwd())):
        assert private not in text


def packages_of(root: Path) -> list[Package]:
    return list(read_packages(root))


def test_the_readme_is_filled_from_the_results_and_then_up_to_date(root: Path) -> None:
    file = root / "results" / "a-b.json"
    figure = {"value": 1.01, "low": 0.9, "high": 1.2, "n": 9.0}
    write_results(file, [Outcome(claim=CLAIM, verdict=HOLDS, figure=figure)])
    entries = read_entries(file.parent)
    assert "out of date" in as_text(check_readmes(packages_of(root), [CLAIM], entries, root=root))
    assert len(write_readmes(packages_of(root), [CLAIM], entries, root=root)) == 2
    text = (root / "packages/a-b/README.md").read_text()
    assert "| It is fast. | <= 1.05 x | the other | 1.01 x (0.9 to 1.2) | holds |" in text
    assert text.endswith("rest\n")
    assert check_readmes(packages_of(root), [CLAIM], entries, root=root) == []
    assert write_readmes(packages_of(root), [CLAIM], entries, root=root) == []


def test_a_figure_changed_by_hand_is_found(root: Path) -> None:
    write_readmes(packages_of(root), [CLAIM], {}, root=root)
    readme = root / "packages/a-b/README.md"
    readme.write_text(readme.read_text().replace("not measured yet", "0.5 x"))
    assert "out of date" in as_text(check_readmes(packages_of(root), [CLAIM], {}, root=root))


def test_a_readme_without_a_place_for_its_figures_is_found(root: Path) -> None:
    (root / "packages/a-b/README.md").write_text("# a-b\n")
    assert "no figures section" in as_text(check_readmes(packages_of(root), [CLAIM], {}, root=root))


def test_what_tests_show_stands_in_claims_md_and_not_in_the_readme(root: Path) -> None:
    shown = replace(CLAIM, id="shown", statement="It is right.", unit="tests", limit=">= 2")
    ours = replace(CLAIM, id="ours", statement="All is quick.", package="repository")
    claims = [CLAIM, shown, ours]
    write_readmes(packages_of(root), claims, {}, root=root)
    page, readme = root / "benchmarks/CLAIMS.md", root / "packages/a-b/README.md"
    row = f"| It is right. | `{CLAIM.command}` | >= 2 tests |  | not measured yet |"
    assert row in page.read_text().partition("## a-b\n")[2].partition("##")[0]
    assert "## repository" in page.read_text() and "All is quick." in page.read_text()
    assert "It is fast." in readme.read_text() and "It is fast." not in page.read_text()
    assert "It is right." not in readme.read_text()
    assert check_readmes(packages_of(root), claims, {}, root=root) == []


def test_a_page_of_claims_that_was_changed_by_hand_or_is_missing_is_found(root: Path) -> None:
    write_readmes(packages_of(root), [CLAIM], {}, root=root)
    page = root / "benchmarks/CLAIMS.md"
    page.write_text(page.read_text() + "more\n")
    assert "CLAIMS.md:1: figures are out of date" in as_text(
        check_readmes(packages_of(root), [CLAIM], {}, root=root)
    )
    page.unlink()
    assert "CLAIMS.md:1" in as_text(check_readmes(packages_of(root), [CLAIM], {}, root=root))


def test_a_package_without_claims_needs_no_figures() -> None:
    assert fill("text", [], {}) == "text"


def test_a_verdict_needs_the_figure_of_the_claim() -> None:
    assert judge(CLAIM, {"else": {"value": 1.0}}, "").verdict == FAILED
    assert judge(CLAIM, {"ratio": {"value": math.nan}}, "").verdict == FALLS_SHORT


def test_the_test_files_that_benchmarks_load_are_there() -> None:
    texts = [file.read_text() for file in ROOT.glob("benchmarks/*.py")]
    loaded = [found for t in texts for found in re.findall(r'load_test\("(.+?)", "(.+?)"\)', t)]
    assert len(loaded) >= 8
    missing = [
        name
        for package, name in loaded
        if not (ROOT / "packages" / package / "tests" / f"{name}.py").is_file()
    ]
    assert missing == []
