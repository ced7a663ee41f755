"""Counts that take hours gather in ledgers: by source, from several processes, part by part."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import comm_collectives_fuzz as fuzz
import comm_collectives_pairs as pairs
from ledgers import Ledger, program_of, source_of

ADDS = """
import sys
from pathlib import Path
from ledgers import Ledger
for i in range(20):
    Ledger(Path(sys.argv[1]), "now").keep(f"{sys.argv[2]} {i}", {"n": i})
"""

# Prints which of the files that are left out run a function in some schedules, and which are none.
RUNS = """
import sys, threading
import comm_collectives_fuzz as program
from comm_collectives.simulation.fuzz import fuzz

codes = set()
def saw(frame, event, argument):
    codes.add(frame.f_code)

threading.setprofile(saw)
sys.setprofile(saw)
fuzz(8, seed=1)
sys.setprofile(None)
start = f"{program.SOURCE}/"
ran = {code.co_filename.removeprefix(start) for code in codes}
print(sorted(name for name in ran if program.is_left_out(name)))
known = program.imported()
print([n for n in program.NOT_RUN if not any(k == n or k.startswith(f"{n}/") for k in known)])
print("simulation/streams.py" in ran)
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with a source and a simulator."""
    for name in ("src/a.py", "src/simulation/b.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    _git(tmp_path, "init", "-q")
    _commit(tmp_path)
    return tmp_path


def _git(root: Path, *command: str) -> None:
    subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@b", *command], cwd=root, check=True
    )


def _commit(root: Path) -> None:
    _git(root, "add", "-A")
    _git(root, "commit", "-q", "-m", "x")


def test_source_is_what_is_committed_of_the_files_that_count(root: Path) -> None:
    first = source_of(root, "src", without=["simulation"])
    (root / "src/simulation/b.py").write_text("x = 2\n")
    assert source_of(root, "src", without=["simulation"]) == first
    with pytest.raises(ValueError, match=r"(?s)commit these first.*simulation/b\.py"):
        source_of(root, "src")
    (root / "src/a.py").write_text("x = 2\n")
    with pytest.raises(ValueError, match=r"(?s)commit these first.*src/a\.py"):
        source_of(root, "src", without=["simulation"])
    _commit(root)
    assert source_of(root, "src", without=["simulation"]) != first


def test_source_without_git_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a git repository"):
        source_of(tmp_path, "src")


def test_a_program_is_what_python_reads_of_its_files(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text('"""What it is."""\n\n\ndef f():\n    """Say so."""\n    return "x"  # why\n')
    first = program_of(tmp_path, [file])
    file.write_text(
        '# Otherwise.\ndef f():\n    """Say it\n    at length."""\n\n    return ("x")\n'
    )
    assert program_of(tmp_path, [file]) == first
    for other in ('def f():\n    return "y"\n', 'def f(x=1):\n    return "x"\n'):
        file.write_text(other)
        assert program_of(tmp_path, [file]) != first
    file.rename(tmp_path / "b.py")
    (tmp_path / "b.py").write_text('def f():\n    return "x"\n')
    assert program_of(tmp_path, [tmp_path / "b.py"]) != first


def test_files_that_decide_nothing_about_schedules_run_nothing_in_them() -> None:
    folder = Path(fuzz.__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", RUNS], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines() == ["[]", "[]", "True"], done.stderr


def test_runs_of_another_program_count_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fuzz, "FILE", tmp_path / "l.json")
    entry = {"schedules": 500, "right": 500, "stuck": []}
    Ledger(fuzz.FILE, "before").keep("1 seed 5", entry)
    Ledger(fuzz.FILE, fuzz.program()).keep("2 seed 6", entry)
    assert fuzz.in_a_row(fuzz.gathered()) == 500
    assert "of another program, so these runs count for nothing: 1\n" in capsys.readouterr().out


def test_parts_of_another_source_count_for_nothing_and_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, now = (Ledger(tmp_path / "a" / "l.json", source) for source in ("before", "now"))
    assert pairs.missing(now, 3) == [1, 2, 3]
    for part in ("1/3", "2/3", "3/4"):
        before.keep(part, {"cells": 5})
    now.keep("1/3", {"cells": 6})
    capsys.readouterr()
    assert pairs.missing(now, 3) == [2, 3]
    said = capsys.readouterr().out
    assert "of another source, so these parts count for nothing: 2\n" in said
    assert "missing of 3 parts: 2, 3\n" in said
    assert now.of_today() == {"1/3": {"cells": 6, "source": "now"}}
    assert set(now.entries()) == {"1/3", "2/3", "3/4"}


def test_several_processes_add_at_once(tmp_path: Path) -> None:
    file = tmp_path / "l.json"

    def add(name: str) -> None:
        command = [sys.executable, "-c", ADDS, str(file), name]
        subprocess.run(command, check=True, cwd=Path(pairs.__file__).parent)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(add, "abc"))
    assert len(Ledger(file, "now").of_today()) == 60


def test_schedules_count_from_the_last_run_that_was_stuck_or_wrong() -> None:
    good = {"schedules": 500, "right": 500, "stuck": []}
    assert fuzz.in_a_row([]) == 0
    assert fuzz.in_a_row([good] * 3) == 1500
    for bad in ({"stuck": ["stuck: rank 3 was busy"]}, {"right": 499}):
        assert fuzz.in_a_row([good, good | bad, good, good]) == 1000


def test_ledgers_of_the_repository_stand_apart_from_results() -> None:
    """Every JSON file beside them is read as results of claims."""
    for file in (pairs.FILE, fuzz.FILE):
        assert file.parent.name == "ledgers" and file.parents[1].name == "results"
