import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpu_alloc.cli import main
from gpu_alloc.core.allocator import TwoPoolAllocator
from gpu_alloc.native.allocator import NativeAllocator

TORCH_SCRIPT = """
import torch
kept = [torch.empty(1 << 20, dtype=torch.uint8, device="cuda") for _ in range(5)]
try:
    torch.empty(8 << 30, dtype=torch.uint8, device="cuda")
except RuntimeError:
    print("raised")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "script.py"


def test_a_script_of_cupy_runs_on_tuned_settings_and_ends_with_its_own_status(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cupy = pytest.importorskip("cupy", reason="the script uses CuPy")
    before = cupy.cuda.get_allocator()
    script.write_text(
        "import sys, cupy\n"
        "assert __name__ == '__main__' and sys.argv[1:] == ['--steps', '3'], sys.argv\n"
        "kept = [cupy.ndarray((1 << 20,), dtype='u1') for _ in range(5)]\n"
        "sys.exit(7)\n"
    )
    settings = tmp_path / "tuned.toml"
    settings.write_text("[gpu_alloc]\nlarge_pool_pre_alloc_in_mb = 16\nsmall_pool_size_in_mb = 0\n")
    command = ["run", "--settings", str(settings), "--on-host", "32MiB", str(script)]
    with pytest.raises(SystemExit) as ended:
        main([*command, "--steps", "3"])
    assert ended.value.code == 7
    said = capsys.readouterr().err
    assert "gpu-alloc: CuPy, device 0: at most 5.00 MiB live and 16.00 MiB reserved" in said
    assert cupy.cuda.get_allocator() == before


def test_a_script_that_needs_too_much_ends_in_its_traceback_and_our_report(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("cupy", reason="the script uses CuPy")
    script.write_text("import cupy\nkept = [cupy.ndarray((1 << 20,), dtype='u1') for _ in 'abc']\n")
    with pytest.raises(SystemExit) as ended:
        main(["run", "--on-host", "2MiB", str(script)])
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert f'File "{script}", line 2' in said
    assert "remedy: the source has no room for 1.00 MiB more" in said


def test_an_account_of_memory_that_a_script_has_broken_is_said(
    script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cupy", reason="the script uses CuPy")
    script.write_text(
        "import ctypes, cupy\n"
        "kept = [cupy.ndarray((1 << 20,), dtype='u1') for _ in 'abc']\n"
        "pool = cupy.cuda.get_allocator().__self__\n"
        "whole = pool.allocator().snapshot()\n"
        "broken = dict(alignment_size=512, chunks=whole.chunks * 2, free_entries=())\n"
        "type(pool.allocator()).snapshot = lambda self: type(whole)(**broken)\n"
    )
    for kind in (TwoPoolAllocator, NativeAllocator):  # to be put back afterwards
        monkeypatch.setattr(kind, "snapshot", kind.snapshot)
    assert main(["run", "--on-host", "8MiB", str(script)]) == 0
    said = capsys.readouterr().err
    assert "CuPy, device 0: the allocator's account of its memory is broken: chunks at" in said
    script.write_text("import cupy\nkept = cupy.ndarray((1 << 20,), dtype='u1')\n")
    monkeypatch.undo()
    assert main(["run", "--on-host", "8MiB", str(script)]) == 0
    assert "broken" not in capsys.readouterr().err


def test_an_error_of_the_script_is_none_of_the_command(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("cupy", reason="the command serves CuPy")
    script.write_text("open('/nowhere/at/all')\n")
    with pytest.raises(SystemExit) as ended:
        main(["run", "--on-host", "2MiB", str(script)])
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert f'File "{script}", line 1' in said
    assert "the script allocated nothing that is served here" in said


@pytest.mark.parametrize("option", [[], ["--segments"]])
def test_tensors_of_a_script_lie_in_our_memory(script: Path, option: list[str]) -> None:
    """With real torch on a device of 1 GiB that is not there."""
    stub: Any = pytest.importorskip("devicetest.cuda_stub")
    script.write_text(TORCH_SCRIPT)
    program = sys.modules[main.__module__].__file__
    command = ["run", "--of", "torch", "--conf", "large_pool_pre_alloc_in_mb:64", *option]
    try:
        done = stub.run_on_stub(program, *command, str(script), gpu_bytes=1 << 30)
    except stub.StubUnavailableError as error:
        pytest.skip(f"no stub of CUDA here: {error}")
    assert (done.returncode, done.stdout) == (0, "raised\n"), done.stderr
    assert "gpu-alloc: torch, device 0: at most 5.00 MiB live" in done.stderr
    ours = "the last request that failed: out of memory: 8.00 GiB" in done.stderr
    assert ours == (not option), done.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--on-host", "2MiB", "--of", "torch"], "--on-host is for CuPy's arrays"),
        (["--segments", "--of", "cupy"], "--segments is for torch"),
        (["--of", "torch", "--conf", "no_such:1"], "no_such"),
        (["--of", "torch", "--settings", "nowhere.toml"], "nowhere.toml"),
    ],
)
def test_options_that_cannot_be_are_refused_before_the_script_begins(
    script: Path, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    script.write_text("raise AssertionError('begun')\n")
    assert main(["run", *options, str(script)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--on-host", "2MiB"], ["--of", "torch", "--of", "cupy"]])
def test_a_library_that_is_not_installed_is_named(
    script: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)  # as where it is not installed
    script.write_text("raise AssertionError('begun')\n")
    assert main(["run", *options, str(script)]) == 2
    said = capsys.readouterr().err
    assert "cupy: not installed in this Python; pip install 'gpu-alloc[cuda13]'" in said or (
        "torch and cupy: not installed" in said  # where the tests run without either
    )


def test_a_machine_without_a_device_is_named(script: Path) -> None:
    cupy = pytest.importorskip("cupy", reason="the command serves CuPy")
    try:
        if cupy.cuda.runtime.getDeviceCount():
            pytest.skip("there is a device here")
    except RuntimeError:
        pass
    script.write_text("raise AssertionError('begun')\n")
    done = subprocess.run(
        [sys.executable, "-m", "gpu_alloc.cli.main", "run", "--of", "cupy", str(script)],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2
    assert "CuPy cannot be served" in done.stderr
    assert "--on-host SIZE" in done.stderr


def test_a_pipe_of_the_script_itself_that_breaks_is_not_taken_for_its_output(script: Path) -> None:
    pytest.importorskip("cupy", reason="the command serves CuPy")
    script.write_text("raise BrokenPipeError(32, 'a socket')")
    code = "import sys; from gpu_alloc.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "run", "--on-host", "16MiB", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and "a socket" in done.stderr
