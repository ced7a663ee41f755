import subprocess
import sys
from pathlib import Path

import pytest

from gpu_alloc import AllocatorConfig, load_trace, replay
from gpu_alloc.cli import main

SCRIPT = """
import sys
import torch
assert __name__ == "__main__" and sys.argv[1:] == ["--steps", "3"], sys.argv
import beside_the_script
kept = torch.zeros(1000)
sys.exit(beside_the_script.status)
"""


def _record(tmp_path: Path, script: str) -> int:
    pytest.importorskip("torch", reason="the scripts use torch")
    (tmp_path / "beside_the_script.py").write_text("status = 7")
    (tmp_path / "script.py").write_text(script)
    out = str(tmp_path / "trace.jsonl")
    return main(["record", "-o", out, "--of", "torch", str(tmp_path / "script.py"), "--steps", "3"])


def test_a_script_is_recorded_and_ends_with_its_own_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv, path = sys.argv[:], sys.path[:]
    with pytest.raises(SystemExit) as ended:
        _record(tmp_path, SCRIPT)
    assert (sys.argv, sys.path) == (argv, path)
    assert ended.value.code == 7
    trace = load_trace(tmp_path / "trace.jsonl")
    assert replay(trace, AllocatorConfig()).peak_live_bytes == 4000
    said = capsys.readouterr()
    assert said.out == ""
    assert "events of torch" in said.err


def test_the_trace_is_written_where_it_was_said_whatever_folder_the_script_goes_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch", reason="the script uses torch")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "script.py").write_text(
        "import os, torch\nos.chdir('elsewhere')\nkept = torch.zeros(10)\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["record", "-o", "trace.jsonl", "--of", "torch", "script.py"]) == 0
    assert load_trace(tmp_path / "trace.jsonl")[0].size_bytes == 40


def test_a_folder_that_is_not_there_is_said_before_the_script_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "script.py").write_text("raise RuntimeError('it ran')\n")
    out = str(tmp_path / "none" / "trace.jsonl")
    assert main(["record", "-o", out, "--of", "torch", str(tmp_path / "script.py")]) == 2
    assert f"there is no folder {tmp_path / 'none'}" in capsys.readouterr().err


def test_a_folder_in_place_of_the_trace_is_said_before_the_script_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "script.py").write_text("raise RuntimeError('it ran')\n")
    assert main(["record", "-o", str(tmp_path), "--of", "torch", str(tmp_path / "script.py")]) == 2
    assert f"--out {tmp_path} is a folder" in capsys.readouterr().err


def test_a_script_that_raises_leaves_its_trace(tmp_path: Path) -> None:
    script = "import torch\nkept = torch.zeros(10)\nraise MemoryError('no more')\n"
    with pytest.raises(MemoryError, match="no more"):
        _record(tmp_path, script)
    assert load_trace(tmp_path / "trace.jsonl")[0].size_bytes == 40


def test_a_missing_file_of_the_script_is_its_own_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        _record(tmp_path, "import torch\nkept = torch.zeros(10)\nopen('/nowhere/at/all')\n")
    assert ended.value.code == 1
    assert 'script.py", line 3' in capsys.readouterr().err
    assert load_trace(tmp_path / "trace.jsonl")[0].size_bytes == 40


def test_cupy_is_recorded_in_all_threads(tmp_path: Path) -> None:
    pytest.importorskip("cupy", reason="the script uses CuPy")
    out = tmp_path / "trace.jsonl"
    (tmp_path / "script.py").write_text(
        "import threading, cupy, gpu_alloc.cupy as ours\n"
        "from gpu_alloc.cupy import backend\n"
        "backend.CudaBackend.stream = lambda self: 0  # no driver here\n"
        "ours.install(backend=ours.HostBackend())\n"
        "cupy.ndarray((5,), dtype='u1')\n"
        "thread = threading.Thread(target=lambda: cupy.ndarray((70,), dtype='u1'))\n"
        "thread.start(); thread.join()\n"
    )
    command = [sys.executable, "-m", "gpu_alloc.cli.main", "record", "-o", str(out), "--of", "cupy"]
    done = subprocess.run(
        [*command, str(tmp_path / "script.py")],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    events = load_trace(out)
    assert [e.size_bytes for e in events if e.action == "alloc"] == [5, 70]


def test_what_cannot_be_recorded_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _record(tmp_path, "pass") == 0
    assert "allocated nothing" in capsys.readouterr().err
    assert not (tmp_path / "trace.jsonl").exists()
    assert main(["record", "--of", "torch", str(tmp_path / "none.py")]) == 2
    assert "none.py is no file" in capsys.readouterr().err


def test_each_device_of_torch_has_a_trace_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = "import torch\na = torch.zeros(10)\nb = torch.zeros(7, device='meta')\ndel a\n"
    assert _record(tmp_path, script) == 0
    said = capsys.readouterr().err
    assert "2 events of torch-cpu" in said
    assert "2 events of torch-meta" in said
    on_cpu = load_trace(tmp_path / "trace.torch-cpu.jsonl")
    assert [(e.action, e.size_bytes) for e in on_cpu] == [("alloc", 40), ("free", 40)]
    on_meta = load_trace(tmp_path / "trace.torch-meta.jsonl")
    assert [(e.action, e.size_bytes) for e in on_meta] == [("alloc", 28), ("free", 28)]
