import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from gpu_alloc import AllocatorConfig, TraceEvent, load_trace, replay, save_trace
from gpu_alloc.cli import main

MIB = 1 << 20


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Holes of 4 MiB between blocks that stay: by the request they cannot be joined."""
    monkeypatch.delenv("GPU_ALLOC_CONF", raising=False)
    monkeypatch.chdir(tmp_path)
    events = [TraceEvent(action="mark", note="load")]
    for number in range(8):
        events.append(
            TraceEvent(
                action="alloc", block_id=number, size_bytes=(4 + number) * MIB, note="load.py:3"
            )
        )
    events += [TraceEvent(action="free", block_id=number) for number in range(7)]
    events.append(TraceEvent(action="mark", note="train"))
    for number in range(10, 14):
        events.append(
            TraceEvent(action="alloc", block_id=number, size_bytes=12 * MIB, note="train.py:9")
        )
    save_trace(events, "trace.jsonl")
    return "trace.jsonl"


def test_explain_prints_a_change_that_runs(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    conf = "large_pool_auto_growth_chunk_size_in_mb:13"
    arguments = ["explain", trace, "--conf", conf, "--capacity-bytes", "60MiB"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "found no room on 60.00 MiB" in out
    assert "the whole trace runs with" in out
    assert main([*arguments, "--json"]) == 0
    failure = json.loads(capsys.readouterr().out)["failure"]
    change = AllocatorConfig.parse(failure["change"])
    assert replay(load_trace(trace), change, 60 * MIB).oom is None
    assert main(["explain", trace, "--capacity-bytes", "1GiB"]) == 0
    assert "the trace runs on this device" in capsys.readouterr().out
    assert main(["explain", trace, "--capacity-bytes", "30MiB"]) == 1
    assert "no settings help" in capsys.readouterr().out


def test_info_names_phase_and_lines(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", trace]) == 0
    out = capsys.readouterr().out
    assert "in 'load'" in out
    assert "load.py:3" in out
    assert main(["info", trace, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["peak_by_line"] == [["load.py:3", facts["peak_live_bytes"]]]


def test_tune_writes_settings_and_compare_shows_them(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", trace, "-o", "tuned.toml", "--first", "1"]) == 0
    config = AllocatorConfig.from_toml("tuned.toml")
    assert f"GPU_ALLOC_CONF={config.format()}" in capsys.readouterr().out
    assert main(["tune", trace, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ratio"] >= 1.0
    conf = "large_pool_auto_growth_chunk_size_in_mb:64"
    assert main(["compare", trace, "--conf", conf]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("default settings", conf, "tuned: "))
    assert main(["compare", trace, trace, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["trace.jsonl"]) == 2


def test_plot_writes_a_picture_or_a_snapshot(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plot", trace, "-o", "a.svg"]) == 0
    assert ElementTree.parse("a.svg").getroot().tag.endswith("svg")
    assert main(["plot", trace, "-o", "a.pickle"]) == 0
    assert len(load_trace("a.pickle")) == len(load_trace(trace))
    assert main(["plot", trace, "-o", "a.png"]) == 2
    assert "write a .svg" in capsys.readouterr().err


def test_a_trace_that_allocates_nothing_is_named_in_place_of_an_empty_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "marks.jsonl")
    save_trace([TraceEvent(action="mark", note="step 1")], path)
    assert main(["info", path]) == 0
    assert "the trace allocates nothing" in capsys.readouterr().out
    assert main(["plot", path, "-o", str(tmp_path / "a.svg")]) == 2
    assert "the trace allocates nothing" in capsys.readouterr().err
    assert not (tmp_path / "a.svg").exists()
