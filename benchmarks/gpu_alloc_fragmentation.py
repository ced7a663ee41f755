"""The smallest device for a step of training, over its peak of live bytes, beside torch's own.

    python benchmarks/gpu_alloc_fragmentation.py [--steps 3]

Eight traces of moe-train's decoders (gpu_alloc_decoder_traces: fake tensors, uneven routing,
lengths that vary, recompute on and off, experts in fp8) from fresh seeds. For each policy the
smallest device on which a trace runs is found by bisection. torch's allocator is torch's own,
native and with expandable segments, on devicetest's stub of CUDA. The tuner ranks its candidates on
the first 40% of a trace and measures the best of them on all of it. "virtual memory" is our policy
with pages mapped behind its places; "planned" is that with the plan of step 1 followed in the steps
after it, whose lengths and routing differ.
"""

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gpu_alloc_decoder_traces import RECIPES, decoder_trace

from devicetest.cuda_stub import StubUnavailableError, run_on_stub
from gpu_alloc import AllocatorConfig, minimal_capacity, plan_step, save_trace
from gpu_alloc.trace import tune

PROGRAM = __file__.replace("gpu_alloc_fragmentation", "gpu_alloc_torch_on_stub")
VIRTUAL = AllocatorConfig(use_virtual_memory=True)
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def torch_needs(paths: Sequence[str], env: dict[str, str]) -> list[int]:
    """Bytes of the smallest device of each trace under torch's allocator."""
    done = run_on_stub(PROGRAM, "capacity", *paths, env=env, timeout_s=1800)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    found: list[int] = json.loads(done.stdout)
    return found


def report(figure: str, values: list[float]) -> None:
    record = {"figure": figure, "value": round(max(values), 4), "unit": "x"}
    record |= {"low": round(min(values), 4), "high": round(max(values), 4), "n": len(values)}
    print(json.dumps(record))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3)
    steps = parser.parse_args().steps
    seed = random.SystemRandom().randrange(1 << 30)
    rows: dict[str, list[float]] = {"default": [], "tuned": [], "virtual memory": [], "planned": []}
    live, paths = [], []
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, recipe) in enumerate(RECIPES.items()):
            trace = decoder_trace(recipe, seed=seed + number, steps=steps)
            tuned = tune(trace)
            live.append(tuned.peak_live_bytes)
            rows["tuned"].append(tuned.ratio)
            rows["default"].append(minimal_capacity(trace, AllocatorConfig()) / live[-1])
            rows["virtual memory"].append(minimal_capacity(trace, VIRTUAL) / live[-1])
            plan = plan_step(trace, "step 1")
            rows["planned"].append(minimal_capacity(trace, VIRTUAL, plan=plan) / live[-1])
            paths.append(str(Path(folder) / f"{number}.jsonl"))
            save_trace(trace, paths[-1])
            print(f"{name}: {len(trace)} events, seed {seed + number}, {tuned.name}", flush=True)
        try:
            for row, env in (("torch", {}), ("torch, expandable segments", EXPANDABLE)):
                needs = torch_needs(paths, env)
                rows[row] = [need / least for need, least in zip(needs, live, strict=True)]
        except StubUnavailableError as error:
            print(f"torch's rows are not measured, there is no stub of CUDA: {error}")
    for row, values in rows.items():
        print(f"{row:<28}" + "".join(f"{value:>8.3f}" for value in values))
    report("gpu_alloc_tuned_over_live", rows["tuned"])
    report("gpu_alloc_virtual_over_live", rows["virtual memory"])
    report("gpu_alloc_planned_over_live", rows["planned"])
    if "torch" in rows:
        pairs = zip(rows["tuned"], rows["torch"], strict=True)
        over = [ours / theirs for ours, theirs in pairs]
        report("gpu_alloc_tuned_over_torch", over)
        for row, name in (
            ("tuned", "tuned"),
            ("virtual memory", "virtual"),
            ("planned", "planned"),
        ):
            pairs = zip(rows[row], rows["torch, expandable segments"], strict=True)
            report(f"gpu_alloc_{name}_over_expandable", [ours - theirs for ours, theirs in pairs])
        print(f"median of tuned over torch: {statistics.median(over):.3f}")


if __name__ == "__main__":
    main()
