"""Programs that know only torch.distributed, run with this package's functions in their place."""

import subprocess
import sys
from contextlib import redirect_stderr
from io import StringIO
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


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["no_such.py"], "no script 'no_such.py'; give the path of a script, or -m"),
        (["-m", "no_such"], "no module 'no_such'; give the path of a script, or -m"),
        (["-m", "no_such.part"], "no module 'no_such.part'"),
        (["-m", ".part"], "no module '.part'"),
    ],
)
def test_a_missing_program_is_named(
    options: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = sys.path[:]
    assert main(["run", *options]) == 2
    assert text in capsys.readouterr().err
    assert sys.path == path


def test_a_module_is_looked_for_without_importing_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text(
        "from torch.distributed import all_reduce\nBY_NAME = all_reduce"
    )
    (tmp_path / "pack" / "train.py").write_text(
        "import torch.distributed as dist\nimport pack\nassert pack.BY_NAME is dist.all_reduce"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setattr(sys, "argv", sys.argv)
    assert main(["run", "-m", "pack.train"]) == 0


_STARTS_RANKS = """
import multiprocessing, os, sys
import torch, torch.distributed as dist

def rank(r, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=r, world_size=2)
    dist.all_reduce(torch.ones(2))

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=rank, args=(r, sys.argv[1])) for r in range(2)]
    [one.start() for one in ranks]
    [one.join() for one in ranks]
    assert not any(one.exitcode for one in ranks)
"""


def test_a_program_whose_ranks_are_its_own_is_told_that_nothing_was_compared(
    program: Path, tmp_path: Path
) -> None:
    (tmp_path / "starts_ranks.py").write_text(_STARTS_RANKS)
    command = [sys.executable, "-m", "comm_collectives", "run"]
    command += ["starts_ranks.py", str(tmp_path / "store")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "starts_ranks.py made no call of torch.distributed's in this process" in done.stderr

    def fn(rank: int, world_size: int) -> None:
        with redirect_stderr(StringIO()) as said:
            assert main(["run", str(program)]) == 0
        assert "made no call" not in said.getvalue()

    run_ranks(fn, 2)
