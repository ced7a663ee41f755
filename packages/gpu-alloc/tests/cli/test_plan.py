import json
from pathlib import Path

import pytest

from gpu_alloc import LifetimePlan, TraceEvent, save_trace
from gpu_alloc.cli import main

MIB = 1 << 20


def test_a_step_is_planned_and_the_plan_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GPU_ALLOC_CONF", raising=False)
    trace, out = str(tmp_path / "trace.jsonl"), tmp_path / "plan.json"
    events = []
    for step in range(2):
        events.append(TraceEvent(action="mark", note=f"step {step}"))
        for size in (2, 4):
            block = 10 * step + size
            events.append(TraceEvent(action="alloc", block_id=block, size_bytes=size * MIB))
        for size in (2, 4):
            events.append(TraceEvent(action="free", block_id=10 * step + size))
        events.append(TraceEvent(action="mark", note=f"end of step {step}"))
    save_trace(events, trace)
    assert main(["plan", trace, "--step", "step 0", "-o", str(out), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["num_places"], facts["size_bytes"]) == (2, 6 * MIB)
    assert facts["planned_capacity_bytes"] == facts["peak_live_bytes"] == 6 * MIB
    assert LifetimePlan.load(out).step == "step 0"
    assert main(["plan", trace]) == 0
    assert "planned" in capsys.readouterr().out
    assert main(["plan", trace, "--step", "step 7"]) == 2
    assert "no mark 'step 7'; it has 'step " in capsys.readouterr().err
