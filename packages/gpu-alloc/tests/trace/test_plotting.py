from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from gpu_alloc import AllocatorConfig, TraceEvent
from gpu_alloc.trace import plotting, save_plot

Traces = Callable[..., list[TraceEvent]]
SVG = "{http://www.w3.org/2000/svg}"


def test_each_block_is_a_box_and_none_overlap(tmp_path: Path, moe_trace: Traces) -> None:
    trace = moe_trace(11, streams=(0, 7))
    trace.append(TraceEvent(action="alloc", block_id=9**9, size_bytes=5, note="<a & b>.py:3"))
    assert save_plot(trace, tmp_path / "trace.svg", AllocatorConfig()) == 0
    root = ElementTree.parse(tmp_path / "trace.svg").getroot()
    boxes = root.findall(f"{SVG}rect")
    assert len(boxes) == sum(event.action == "alloc" for event in trace)
    assert len(root.findall(f"{SVG}polyline")) == 2
    assert any("<a & b>.py:3" in (box.findtext(f"{SVG}title") or "") for box in boxes)
    assert "http" not in (tmp_path / "trace.svg").read_text().replace(SVG[1:-1], "")


def test_pages_are_drawn_where_they_were_mapped(tmp_path: Path, moe_trace: Traces) -> None:
    trace, config = moe_trace(13), AllocatorConfig(use_virtual_memory=True)
    assert save_plot(trace, tmp_path / "trace.svg", config) == 0
    root = ElementTree.parse(tmp_path / "trace.svg").getroot()
    boxes = root.findall(f"{SVG}rect")
    assert len(boxes) == sum(event.action == "alloc" for event in trace)
    places = [float(box.attrib["y"]) for box in boxes]
    assert min(places) >= 0
    assert max(places) - min(places) > 100  # of 420: not all at the end of 256 GiB


def test_too_many_blocks_leave_the_smallest_out_and_say_so(
    tmp_path: Path, moe_trace: Traces, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plotting, "_MOST_BOXES", 10)
    trace = moe_trace(12)
    left_out = save_plot(trace, tmp_path / "trace.svg")
    assert left_out == sum(event.action == "alloc" for event in trace) - 10
    assert f"{left_out} smaller blocks are not drawn" in (tmp_path / "trace.svg").read_text()


def test_an_empty_trace_is_an_empty_picture(tmp_path: Path) -> None:
    assert save_plot([], tmp_path / "trace.svg") == 0
    assert ElementTree.parse(tmp_path / "trace.svg").getroot().findall(f"{SVG}rect") == []
