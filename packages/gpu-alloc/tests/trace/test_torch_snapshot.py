import json
import pickle
import random
from pathlib import Path
from typing import Any

import pytest

from gpu_alloc import AllocatorConfig, AllocError, TraceEvent, load_trace, replay, save_trace
from gpu_alloc.cli import main
from gpu_alloc.trace import read_torch_snapshot, save_torch_snapshot
from gpu_alloc.trace.torch_snapshot import torch_snapshot

MIB = 1 << 20


def _random_trace(rng: random.Random, num_steps: int) -> list[TraceEvent]:
    live: list[int] = []
    events: list[TraceEvent] = []
    for step in range(num_steps):
        if live and rng.random() < 0.48:
            block = live.pop(rng.randrange(len(live)))
            events.append(TraceEvent(action="free", block_id=block))
        else:
            size = int(10 ** rng.uniform(1, 7))
            note = f"model.py:{step}"
            events.append(
                TraceEvent(
                    action="alloc",
                    block_id=step,
                    size_bytes=size,
                    stream=rng.choice((0, 7)),
                    note=note,
                )
            )
            live.append(step)
    return events


def _renumbered(events: list[TraceEvent]) -> list[tuple[str, int, int, int, str]]:
    numbers: dict[int, int] = {}
    return [
        (
            e.action,
            -1 if e.action == "mark" else numbers.setdefault(e.block_id, len(numbers)),
            e.size_bytes,
            e.stream if e.action == "alloc" else 0,
            e.note,
        )
        for e in events
    ]


def test_a_trace_survives_the_way_through_a_torch_snapshot(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    trace = _random_trace(random.Random(seed), 400)
    trace.insert(9, TraceEvent(action="mark", note="step 1"))
    save_torch_snapshot(trace, tmp_path / "snapshot.pickle", AllocatorConfig())
    again = load_trace(tmp_path / "snapshot.pickle")
    assert _renumbered(again) == _renumbered(trace), f"seed {seed}"


def test_torchs_viewer_opens_ours() -> None:
    viewer = pytest.importorskip("torch.cuda._memory_viz", reason="torch has the viewer")
    snapshot = torch_snapshot(_random_trace(random.Random(3), 300), AllocatorConfig())
    total = sum(segment["total_size"] for segment in snapshot["segments"])
    assert f"{total / MIB:.1f}MiB" in viewer.segsum(snapshot)
    assert "alloc" in viewer.trace(snapshot)
    assert "<script" in viewer.trace_plot(snapshot)


def test_segments_come_and_go_in_the_history() -> None:
    trace = [
        TraceEvent(action="alloc", block_id=1, size_bytes=3 * MIB),
        TraceEvent(action="free", block_id=1),
    ]
    snapshot = torch_snapshot(trace, AllocatorConfig(free_idle_chunk=True))
    actions = [entry["action"] for entry in snapshot["device_traces"][0]]
    assert actions == ["segment_alloc", "alloc", "free_requested", "free_completed", "segment_free"]
    assert snapshot["segments"] == []
    snapshot = torch_snapshot(trace[:1], AllocatorConfig())
    (segment,) = snapshot["segments"]
    assert (segment["total_size"], segment["requested_size"]) == (4 * MIB, 3 * MIB)
    assert [block["state"] for block in segment["blocks"]] == ["inactive", "active_allocated"]


def _entry(action: str, addr: int = 0, size: int = 512) -> dict[str, Any]:
    frames = [
        {"filename": "??", "line": 0, "name": "at::empty"},
        {"filename": "/x/torch/nn/linear.py", "line": 9, "name": "f"},
        {"filename": "/jobs/train.py", "line": 12, "name": "main"},
    ]
    return {"action": action, "addr": addr, "size": size, "stream": 0, "frames": frames}


def test_blocks_from_before_the_history_come_first() -> None:
    snapshot = {
        "device_traces": [
            [],
            [
                _entry("segment_alloc", 4096, 2 * MIB),
                _entry("alloc", 4096, 100),
                _entry("free_requested", 8192, 300),
                _entry("free_completed", 8192, 300),
                _entry("oom", size=9 * MIB),
            ],
        ],
        "segments": [
            {
                "device": 1,
                "address": 4096,
                "stream": 5,
                "blocks": [
                    {"address": 4096, "size": 512, "requested_size": 100, "state": "active_x"},
                    {"size": 512, "requested_size": 0, "state": "inactive"},
                    {"address": 5120, "size": 512, "requested_size": 7, "state": "active_x"},
                ],
            }
        ],
    }
    events = read_torch_snapshot(snapshot)
    said = [(e.action, e.size_bytes, e.stream) for e in events]
    assert said == [
        ("alloc", 300, 0),
        ("alloc", 7, 5),
        ("alloc", 100, 0),
        ("free", 0, 0),
        ("alloc", 9 * MIB, 0),
        ("free", 0, 0),
    ]
    assert events[2].note == "/jobs/train.py:12"
    assert replay(events, AllocatorConfig()).oom is None


@pytest.mark.parametrize(
    ("snapshot", "said"),
    [
        ({}, "_record_memory_history"),
        ({"device_traces": [[], []]}, "no history"),
        ({"device_traces": [[_entry("alloc")], [_entry("alloc")]]}, r"devices \[0, 1\]"),
        ({"device_traces": [[_entry("grow")]]}, "'grow'"),
        ({"device_traces": [[{"action": "alloc", "addr": 3}]]}, "entry 0 of the history"),
    ],
)
def test_what_is_no_history_is_refused(snapshot: dict[str, Any], said: str) -> None:
    with pytest.raises(AllocError, match=said):
        read_torch_snapshot(snapshot)
    with pytest.raises(AllocError, match="device 7"):
        read_torch_snapshot({"device_traces": [[_entry("alloc")]]}, device=7)


_HISTORY = {"device_traces": [[{"action": "snapshot"}]]}


class _Evil:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return print, ("run",)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (pickle.dumps(_Evil()), "plain values"),
        (pickle.dumps([1]), "expected a torch snapshot"),
        (pickle.dumps({})[:4], "cut.pickle is no whole pickle"),
        (b"\x80\x04}K\x01a.", "cut.pickle is no whole pickle: AttributeError"),
        (b"\x80\x04}]K\x01s.", "cut.pickle is no whole pickle: TypeError"),
        (b"\x80\x04\x95" + 8 * b"\xff", "cut.pickle is no whole pickle: OverflowError"),
        (pickle.dumps({"device_traces": [1]}), "no device_traces"),
        (pickle.dumps(_HISTORY | {"segments": [1]}), "a segment of the snapshot is none"),
    ],
)
def test_a_pickle_of_something_else_runs_nothing_and_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, said: str
) -> None:
    (tmp_path / "cut.pickle").write_bytes(content)
    with pytest.raises(AllocError, match=said):
        load_trace(tmp_path / "cut.pickle")
    assert capsys.readouterr().out == ""


def test_pages_are_segments_that_expand(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    trace = _random_trace(random.Random(seed), 400)
    config = AllocatorConfig(use_virtual_memory=True)
    snapshot = torch_snapshot(trace, config)
    (history,) = snapshot["device_traces"]
    signs = {"segment_map": 1, "segment_unmap": -1}
    held = sum(signs.get(entry["action"], 0) * entry["size"] for entry in history)
    segments = snapshot["segments"]
    assert held == sum(segment["total_size"] for segment in segments) > 0, f"seed {seed}"
    assert held == replay(trace, config).stats.reserved_bytes, f"seed {seed}"
    for segment in segments:
        assert segment["is_expandable"]
        assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]
    save_torch_snapshot(trace, tmp_path / "snapshot.pickle", config)
    again = load_trace(tmp_path / "snapshot.pickle")
    assert _renumbered(again) == _renumbered(trace), f"seed {seed}"


def test_a_device_is_chosen_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = AllocatorConfig()
    sizes = (1000, 5 * MIB)
    snapshots = [
        torch_snapshot([TraceEvent(action="alloc", block_id=1, size_bytes=size)], config)
        for size in sizes
    ]
    both = dict(snapshots[0])
    both["device_traces"] = [found["device_traces"][0] for found in snapshots]
    both["segments"] = [
        segment | {"device": device}
        for device, found in enumerate(snapshots)
        for segment in found["segments"]
    ]
    path = tmp_path / "both.pickle"
    path.write_bytes(pickle.dumps(both))
    assert main(["info", str(path)]) == 2
    assert "--device chooses" in capsys.readouterr().err
    for device, size in enumerate(sizes):
        assert main(["info", str(path), "--device", str(device), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["peak_live_bytes"] == size
        assert main(["compare", str(path), "--device", str(device)]) == 0
        assert "torch, as it ran" in capsys.readouterr().out
    save_trace([TraceEvent(action="alloc", block_id=1, size_bytes=5)], tmp_path / "a.jsonl")
    assert main(["info", str(tmp_path / "a.jsonl"), "--device", "0"]) == 2
    assert "is of one device and does not say which" in capsys.readouterr().err
