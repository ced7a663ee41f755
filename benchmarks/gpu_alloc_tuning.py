"""How long tuning takes, what it saves, and whether `explain` names a change wherever there is one.

    python benchmarks/gpu_alloc_tuning.py [--seeds 6] [--events 50000]

Traces come from gpu_alloc_moe_trace (variable length, uneven routing, with and without recompute),
seeds are fresh and printed. Seconds are CPU time of one thread, for a trace of at least `--events`
events. For `explain`, devices between the tuner's smallest and what the default settings need are
tried: on each that the tuner can use, `explain` must name a change, and the change is replayed
here.
"""

import argparse
import json
import random
import statistics
import time

from gpu_alloc_moe_trace import SHAPES, moe_trace

from gpu_alloc import AllocatorConfig, TraceEvent, minimal_capacity, replay
from gpu_alloc.trace import explain, tune

PAGE = 2 << 20


def trace_of(shape_name: str, seed: int, num_events: int) -> list[TraceEvent]:
    steps = 3
    while True:
        trace = moe_trace(SHAPES[shape_name], seed=seed, steps=steps)
        if len(trace) >= num_events:
            return trace
        steps = max(steps + 1, steps * num_events // len(trace))


def explained(trace: list[TraceEvent], rng: random.Random) -> tuple[int, int]:
    """(devices on which a change is named and runs, devices on which the tuner finds one)."""
    tuned = tune(trace)
    # More than what the tuner found only where the default settings ask the device too often.
    needed = max(minimal_capacity(trace, AllocatorConfig()), tuned.capacity_bytes)
    named = possible = 0
    for capacity in (tuned.capacity_bytes, rng.randrange(tuned.capacity_bytes, needed + PAGE)):
        found = explain(trace, AllocatorConfig(), capacity)
        if found is None:
            continue
        possible += 1
        if found.change is not None and replay(trace, found.change, capacity).oom is None:
            named += 1
    return named, possible


def report(figure: str, values: list[float], unit: str) -> None:
    record = {"figure": figure, "value": round(statistics.median(values), 3), "unit": unit}
    record |= {"low": round(min(values), 3), "high": round(max(values), 3), "n": len(values)}
    print(json.dumps(record))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--events", type=int, default=50_000)
    arguments = parser.parse_args()
    seconds: list[float] = []
    named = possible = 0
    for shape_name in SHAPES:
        for _ in range(arguments.seeds):
            seed = random.SystemRandom().randrange(1 << 30)
            counts = explained(trace_of(shape_name, seed, 1), random.Random(seed))
            named, possible = named + counts[0], possible + counts[1]
            print(f"{shape_name}, seed {seed}: explained {counts[0]} of {counts[1]}")
        trace = trace_of(shape_name, seed, arguments.events)
        start = time.process_time()
        tuned = tune(trace)
        seconds.append(time.process_time() - start)
        print(f"{shape_name}, {len(trace)} events: {tuned.name}, {tuned.ratio:.3f} x live")
    report("gpu_alloc_tune_seconds", [max(seconds)], "s")
    report("gpu_alloc_explained", [named / max(possible, 1)], "of those possible")


if __name__ == "__main__":
    main()
