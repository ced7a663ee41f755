"""Programs that know only torch.distributed, run with this package's functions in their place."""

import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from comm_collectives.checking import run_program
from comm_collectives.cli import main
from comm_collectives.errors import MismatchError
from ranktest import run_ranks

_PROGRAM = """
import sys

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp, all_reduce  # by name: still not torch's own

import beside

x = torch.full((4, 2), float(dist.get_rank())).t()  # strided: wrong with torch's own on gloo
all_reduce(x)
assert (x == 1).all() and __name__ == "__main__" and beside.FOUND
if sys.argv[1:] == ["--differ"]:
    dist.all_reduce(torch.ones(2), ReduceOp.MAX if dist.get_rank() else ReduceOp.SUM)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text("FOUND = True")
    path = tmp_path / "train_with_torch.py"
    path.write_text(_PROGRAM)
    return path


def test_ranks_of_a_program_that_make_different_calls_are_named_with_its_line(
    program: Path,
) -> None:
    def fn(rank: int, world_size: int) -> None:
        torchs = dist.all_reduce
        assert main(["run", str(program)]) == 0
        with pytest.raises(MismatchError, match=r"op differs.*train_with_torch.py:14"):
            main(["run", str(program), "--differ"])
        assert dist.all_reduce is torchs

    run_ranks(fn, 2)


def test_a_module_is_run_where_the_command_is(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(program.parent)

    def fn(rank: int, world_size: int) -> None:
        sys.path.insert(0, "")
        with pytest.raises(MismatchError):
            run_program("train_with_torch", ["--differ"], is_module=True)

    run_ranks(fn, 2)


def test_a_script_has_its_own_arguments_and_finds_itself_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    Path("script.py").write_text(
        "import os, pathlib, sys\nos.chdir('/')\n"
        "pathlib.Path(__file__).with_name('said').write_text(repr(sys.argv[1:]))"
    )
    for before in ([], ["--"]):
        for own in (["--", "-m", "x"], ["-h", "--", "y"], []):
            monkeypatch.chdir(tmp_path)
            assert main(["run", *before, "script.py", *own]) == 0
            assert (tmp_path / "said").read_text() == repr(own)


def test_a_missing_script_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "no_such.py"]) == 2
    assert "no script 'no_such.py'; give its path, or -m and a module" in capsys.readouterr().err
