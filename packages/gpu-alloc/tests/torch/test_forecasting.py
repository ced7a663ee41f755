import json
import random
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the forecast is of torch's programs")

from gpu_alloc import AllocatorConfig, AllocError, TraceEvent, replay, save_trace  # noqa: E402
from gpu_alloc.torch import TraceRecorder, forecast  # noqa: E402

MIB = 1 << 20
PROGRAM = """
import json, sys, torch
from gpu_alloc import load_trace
torch.cuda.init()
alloc = torch._C._cuda_cudaCachingAllocator_raw_alloc
delete = torch._C._cuda_cudaCachingAllocator_raw_delete
live = {}
for event in load_trace(sys.argv[1]):
    if event.action == "alloc" and event.size_bytes:
        live[event.block_id] = alloc(event.size_bytes, event.stream)
    elif event.action == "free" and event.block_id in live:
        delete(live.pop(event.block_id))
print(json.dumps(torch.cuda.memory_stats()["reserved_bytes.all.peak"]))
"""


def _trace(seed: int) -> list[TraceEvent]:
    """Blocks of two streams and of all sizes that matter to torch's rules, freed in any order."""
    rng, live, trace = random.Random(seed), [], []
    for block in range(2000):
        if live and rng.random() < 0.48:
            trace.append(TraceEvent(action="free", block_id=live.pop(rng.randrange(len(live)))))
        size = rng.choice((rng.randrange(1, 2 * MIB), rng.randrange(1, 24 * MIB), 512, MIB))
        stream = rng.choice((0, 0, 16))
        trace.append(TraceEvent(action="alloc", block_id=block, size_bytes=size, stream=stream))
        live.append(block)
        if len(live) > 60:
            trace.append(TraceEvent(action="free", block_id=live.pop(0)))
    return trace


@pytest.mark.parametrize("allocator", ["torch", "torch-expandable"])
def test_what_torch_reserves_is_forecast(allocator: str, tmp_path: Path) -> None:
    stub = pytest.importorskip("devicetest.cuda_stub")
    seed = random.SystemRandom().randrange(1 << 30)
    trace = _trace(seed)
    save_trace(trace, tmp_path / "trace.jsonl")
    (tmp_path / "program.py").write_text(PROGRAM)
    value = str(allocator == "torch-expandable")
    env = {"PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{value}"}
    try:
        done = stub.run_on_stub(
            str(tmp_path / "program.py"), str(tmp_path / "trace.jsonl"), env=env, timeout_s=120
        )
    except stub.StubUnavailableError as error:
        pytest.skip(f"no stub of CUDA here: {error}")
    assert done.returncode == 0, done.stderr[-2000:]
    reserved = json.loads(done.stdout)
    found = forecast(trace, allocator).reserved_bytes
    assert found == reserved, f"seed {seed}"


def test_the_peak_is_told_by_what_it_consists_of() -> None:
    with TraceRecorder(labels={"torch.optim": "optimizer"}) as recorder:
        weight = torch.nn.Parameter(torch.randn(256, 256))
        recorder.label("parameters", [weight])
        optimizer = torch.optim.AdamW([weight], foreach=False, fused=False)
        with recorder.phase("step"):
            for _ in range(2):
                x = torch.randn(16, 256)
                (x @ weight).sum().backward()
                recorder.label("gradients", [weight.grad])
                optimizer.step()
                optimizer.zero_grad()
    found = forecast(recorder.events, "gpu-alloc", AllocatorConfig())
    parts = found.peak_by_category
    size = 256 * 256 * 4
    assert (parts["parameters"], parts["gradients"]) == (size, size)
    assert parts["optimizer"] >= 2 * size, "two moments"
    assert found.phase == "step"
    assert sum(parts.values()) == found.peak_bytes
    assert found.reserved_bytes == replay(recorder.events, AllocatorConfig()).peak_reserved_bytes


def test_a_label_that_is_also_the_name_of_what_has_none_adds_to_it() -> None:
    with TraceRecorder() as recorder:
        labelled, other = torch.zeros(100), torch.zeros(200)
        recorder.label("activations", [labelled])
    assert other.numel() == 200
    assert forecast(recorder.events, "torch").peak_by_category == {"activations": 1200}


def test_memory_made_unseen_is_recorded_when_it_is_told_of() -> None:
    unseen = torch.zeros(1000)
    with TraceRecorder() as recorder:
        recorder.add([unseen, unseen.view(10, 100)])
        del unseen
    assert [(e.action, e.size_bytes) for e in recorder.events] == [("alloc", 4000), ("free", 4000)]


def test_what_is_no_allocator_is_refused() -> None:
    with pytest.raises(AllocError, match="allocator='cuda'; give one of 'torch'"):
        forecast([], "cuda")
    with pytest.raises(AllocError, match="config is of allocator='gpu-alloc'"):
        forecast([], "torch", AllocatorConfig())
