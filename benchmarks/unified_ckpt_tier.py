"""A save in the tier of two nodes, copies included, against the plain work of it.

Two real ranks, each a node of its own with a folder in memory. The floor writes this rank's bytes
into a file there with pwrite, and sends them to the other rank over gloo, which writes them into
another file; both ways at once, in chunks, nothing is checked, agreed about or fsynced. Ours does
the same with headers, checksums of what is written and once more of what came, agreements, renames.
Both alternate in one run. The growth of memory is that of the process (RSS) during the saves.

    python benchmarks/unified_ckpt_tier.py --mib 256 --runs 7
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from ranktest import run_ranks
from unified_ckpt import Shard
from unified_ckpt.tiers import NodeTier, TierOptions

CHUNK_BYTES = 8 * 1024 * 1024
MATRIX_BYTES = 4 * 1024 * 4096


def make_state(mib: int, rank: int) -> dict[str, list[Shard]]:
    """Matrices of 16 MiB that are cut over both ranks, as tensor parallelism cuts them."""
    shards = [
        Shard.of(
            f"layers.{number}.weight",
            torch.rand(1024, 4096),
            global_shape=(2048, 4096),
            offset=(1024 * rank, 0),
        )
        for number in range(max(1, (mib << 20) // MATRIX_BYTES))
    ]
    return {"model": shards}


def plain(flat: torch.Tensor, folder: Path, rank: int) -> None:
    """The floor: write one's own bytes, send them, write the other's."""
    folder.mkdir(exist_ok=True)
    view = memoryview(flat.numpy())
    own = os.open(folder / "own", os.O_WRONLY | os.O_CREAT)
    other = os.open(folder / "other", os.O_WRONLY | os.O_CREAT)
    buffers = torch.empty((2, CHUNK_BYTES), dtype=torch.uint8)
    for start in range(0, len(view), CHUNK_BYTES):
        os.pwrite(own, view[start : start + CHUNK_BYTES], start)
    before: Callable[[], object] = lambda: None  # noqa: E731
    for number, start in enumerate(range(0, len(view), CHUNK_BYTES)):
        chunk = flat[start : start + CHUNK_BYTES]
        buffer = buffers[number % 2][: len(chunk)]
        works = [dist.isend(chunk, 1 - rank), dist.irecv(buffer, 1 - rank)]
        before()

        def before(works: list = works, buffer: torch.Tensor = buffer, start: int = start) -> None:
            for work in works:
                work.wait()
            os.pwrite(other, memoryview(buffer.numpy()), start)

    before()
    os.close(own)
    os.close(other)


class Growth:
    """The most memory that this process has more than at the beginning, looked at all the time."""

    def __init__(self) -> None:
        self._begin = self.most = self._now()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _now(self) -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def _look(self) -> None:
        while not self._done.wait(0.002):
            self.most = max(self.most, self._now())

    def stop(self) -> int:
        self._done.set()
        self._thread.join()
        return self.most - self._begin


def measure(memory: Path, mib: int, runs: int) -> None:
    rank = dist.get_rank()
    state = make_state(mib, rank)
    flat = torch.cat([shard.tensor.reshape(-1) for shard in state["model"]]).view(torch.uint8)
    taken: dict[str, list[float]] = {"ours": [], "floor": []}
    with NodeTier(TierOptions(folder=memory / f"node-{rank}", node=f"n{rank}")) as tier:
        sides: dict[str, Callable[[int], object]] = {
            "ours": lambda step: tier.save(state, step),
            "floor": lambda step: plain(flat, memory / f"plain-{rank}-{step}", rank),
        }
        growth = 0
        for step in range(runs + 1):
            for name in sorted(sides, reverse=bool(step % 2)):
                dist.barrier()
                watch = Growth() if name == "ours" and step else None
                start = time.perf_counter()
                sides[name](step)
                elapsed = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
                growth = max(growth, watch.stop() if watch else 0)
                dist.all_reduce(elapsed, dist.ReduceOp.MAX)
                if step:  # the first run warms up
                    taken[name].append(float(elapsed))
            for file in (memory / f"plain-{rank}-{step}").iterdir():
                file.unlink()
    most = torch.tensor([growth])
    dist.all_reduce(most, dist.ReduceOp.MAX)
    if rank == 0:
        ratios = sorted(a / b for a, b in zip(taken["ours"], taken["floor"], strict=True))
        report("unified_ckpt_tier_vs_plain", ratios, "x")
        report("unified_ckpt_tier_memory", [int(most) / 2**20], "MiB")


def report(figure: str, values: Sequence[float], unit: str) -> None:
    quarter = len(values) // 4
    line = {
        "figure": figure,
        "value": round(statistics.median(values), 3),
        "low": round(values[quarter], 3),
        "high": round(values[-1 - quarter], 3),
        "unit": unit,
        "n": len(values),
    }
    print(json.dumps(line), flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure on two ranks."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mib", type=int, default=256, help="of each rank")
    parser.add_argument("--runs", type=int, default=7)
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="unified-ckpt-tier-", dir="/dev/shm") as folder:
        work = lambda *_: measure(Path(folder), arguments.mib, arguments.runs)  # noqa: E731
        run_ranks(work, 2, timeout_s=600)
    return 0


if __name__ == "__main__":
    sys.exit(main())
