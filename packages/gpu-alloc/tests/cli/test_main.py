import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_alloc import TraceEvent, save_trace
from gpu_alloc.cli import main, parse_size

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPU_ALLOC_CONF", raising=False)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl"
    sizes = [100, 3 * MIB, 5 * MIB]
    save_trace(
        [TraceEvent(action="alloc", block_id=i, size_bytes=s) for i, s in enumerate(sizes)], path
    )
    return str(path)


def test_replay_prints_peaks(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", trace]) == 0
    out = capsys.readouterr().out
    assert "3 of 3" in out
    assert "8.00 MiB  (1.000 x live)" in out
    assert "12.00 MiB  (1.500 x live)" in out


def test_replay_as_json_with_configuration(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    conf = "large_pool_auto_growth_chunk_size_in_mb:64"
    assert main(["replay", trace, "--conf", conf, "--minimal-capacity", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["large_pool_peak_bytes"] == 64 * MIB
    assert facts["minimal_capacity_bytes"] == 12 * MIB
    assert facts["oom"] is None


def test_a_file_that_is_not_there_or_no_trace_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing, other = tmp_path / "missing.jsonl", tmp_path / "notes.txt"
    other.write_text("some notes\n", encoding="utf-8")
    assert main(["replay", str(missing)]) == main(["replay", str(other)]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first == f"gpu-alloc: {missing}: No such file or directory"
    assert second.startswith(f"gpu-alloc: {other}:1: expected ")
    assert second.endswith("got 'some notes'; write traces with `gpu-alloc record` or save_trace")


def test_replay_out_of_memory_is_status_1(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", trace, "--capacity-bytes", "8MiB"]) == 1
    printed = capsys.readouterr()
    assert "2 of 3" in printed.out
    assert "event 2: out of memory: 5.00 MiB" in printed.err
    assert "remedy:" in printed.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["replay", "missing.jsonl"], "missing.jsonl"),
        (["replay", "."], "directory"),
        (["config", "--conf", "alignment_sise:1"], "did you mean 'alignment_size'"),
        (["sizes", "9MiB", "--conf", "memory_limit_in_mb:4"], "memory_limit_in_mb"),
    ],
)
def test_wrong_input_is_one_message_and_status_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert printed.err.startswith("gpu-alloc: ")
    assert "Traceback" not in printed.err


def test_wrong_environment_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GPU_ALLOC_CONF", "nonsense")
    assert main(["config"]) == 2
    assert "GPU_ALLOC_CONF='nonsense'" in capsys.readouterr().err


def test_config_names_the_origin_of_each_value(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GPU_ALLOC_CONF", "small_pool_size_in_mb:2,memory_limit_in_mb:9")
    assert main(["config", "--conf", "memory_limit_in_mb:7"]) == 0
    lines = capsys.readouterr().out.splitlines()
    words = {line.split()[0]: line.split()[1:] for line in lines if line and "=" not in line}
    assert words["small_pool_size_in_mb"] == ["2", "GPU_ALLOC_CONF"]
    assert words["memory_limit_in_mb"] == ["7", "--conf"]
    assert words["alignment_size"] == ["512", "default"]
    monkeypatch.setenv(*lines[-1].split("=", 1))
    assert main(["config", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["memory_limit_in_mb"] == 7


def test_sizes_show_padding_routing_and_growth(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sizes", "0", "1000", "1MiB", "3.5MiB", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["sizes"]
    assert [(row["padded_bytes"], row["pool"], row["first_chunk_bytes"]) for row in rows] == [
        (0, "none", 0),
        (1024, "small", 2 * MIB),
        (MIB, "small", 2 * MIB),
        (3584 * 1024, "large", 4 * MIB),
    ]
    assert main(["sizes", "1000"]) == 0
    assert "small" in capsys.readouterr().out


def test_sizes_are_read_with_units() -> None:
    assert [parse_size(t) for t in ("7", " 2 KiB", "1.5mib", "80GiB", "9B")] == [
        7,
        2048,
        3 * MIB // 2,
        80 << 30,
        9,
    ]
    for text in ("", "-1", "1MB", "1e3", "MiB", "²"):
        with pytest.raises(Exception, match="is not a size"):
            parse_size(text)


def test_help_and_commands_import_neither_torch_nor_cupy() -> None:
    code = (
        "import sys\n"
        "from gpu_alloc.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "assert main(['sizes', '5']) == 0\n"
        "assert not {'torch', 'cupy', 'numpy'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "replay" in done.stdout


def test_sizes_are_shown_with_pages_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sizes", "1000", "5MiB", "--json", "--conf", "use_virtual_memory:true"]) == 0
    rows = json.loads(capsys.readouterr().out)["sizes"]
    assert [row["first_chunk_bytes"] for row in rows] == [2 << 20, 6 << 20]


def test_a_reader_that_has_seen_enough_ends_a_command_without_a_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(["config"]) == 1
        monkeypatch.undo()
    assert capsys.readouterr().err == ""
