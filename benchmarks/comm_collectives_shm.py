"""The shared-memory backend against gloo: every collective, 4 KiB to 64 MiB, in alternating rounds.

Two ranks, each on one thread; the bytes are those of each rank's input. A cell is the median over
rounds of gloo's time / ours, a round's time that of its slowest rank; a figure is that of the worst
cell, with its quartiles. The floor of an all_reduce is two copies of its bytes by each rank (into
shared memory, and the sum out of it), taken in the same rounds. Four ranks are reported too; with
fewer cores than ranks they measure the scheduler more than the backends.

    python benchmarks/comm_collectives_shm.py
"""

import json
import sys

from comm_collectives.checking import BenchResult, bench_machine, format_bench, quartiles

TIMEOUT_S = 1200
LARGEST = 64 << 20


def figure(name: str, spread: tuple[float, float, float], where: BenchResult) -> None:
    low, middle, high = (round(value, 3) for value in spread)
    values = {"value": middle, "low": low, "high": high, "unit": "x", "n": where.case.rounds}
    cell = f"{where.case.collective}, {where.case.num_bytes} bytes"
    print(json.dumps({"figure": name, **values, "worst": cell}))


def worst(results: list[BenchResult]) -> BenchResult:
    return min(results, key=lambda result: result.speedup[1])


def main() -> None:
    for num_ranks in (2, 4):
        report = bench_machine(num_ranks, timeout_s=TIMEOUT_S)
        print(format_bench(report), file=sys.stderr)
        suffix = "" if num_ranks == 2 else f"_{num_ranks}_ranks"
        results = list(report.results)
        slowest = worst(results)
        figure(f"shm_worst_speed_vs_gloo{suffix}", slowest.speedup, slowest)
        exchanges = [r for r in results if r.case.collective == "all_to_all_single"]
        slowest = worst([r for r in exchanges if r.case.num_bytes <= 1 << 16])
        figure(f"shm_all_to_all_speed_vs_gloo_to_64kib{suffix}", slowest.speedup, slowest)
        reductions = [r for r in results if r.case.collective == "all_reduce"]
        slowest = worst([r for r in reductions if r.case.num_bytes >= 1 << 20])
        figure(f"shm_all_reduce_speed_vs_gloo_from_1mib{suffix}", slowest.speedup, slowest)
        if num_ranks == 2:
            big = next(r for r in reductions if r.case.num_bytes == LARGEST)
            over = [s / (2 * c) for s, c in zip(big.shm_s, big.copy_s, strict=True)]
            figure("shm_all_reduce_time_vs_two_copies", quartiles(over), big)


if __name__ == "__main__":
    main()
