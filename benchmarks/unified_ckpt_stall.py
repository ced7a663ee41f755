"""How long a trainer stands still for a save: ours and torch's async save against a plain memcpy.

The floor copies the same bytes into memory that is there already, with all of torch's threads.
Ours, whole: the time inside `async_save`, of ready-made shards and of a module with its optimizer,
whose state is taken apart then. Ours, chunked: all time inside `begin_save`,
`offload_chunk` and `finish` over a step of 8 microbatches, so waiting before the next optimizer
step counts. The first save counts as every other. Ours and the floor alternate, and before each the
saver process is idle. torch's saves come after all of ours: once their result is there, a thread of
theirs frees its copy of the state, for longer than a save of ours stalls. The lowest and highest of
a total are those of its saves. Beside them: by how much longer a step with a chunked save takes.

    python benchmarks/unified_ckpt_stall.py --mib 512 --runs 15
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from unified_ckpt import AsyncSaver, AsyncSaverConfig, Shard, ZeroCostSaver, async_save

MICROBATCHES = 8


def make_state(mib: int) -> dict[str, torch.Tensor]:
    """Weights as in a small model: large matrices, expert slices and vectors, bf16 and fp32."""
    tensors: dict[str, torch.Tensor] = {}
    left, number = mib << 20, 0
    while left > 0:
        for shape, dtype in (
            ((1024, 1024), torch.float32),
            ((768, 2048), torch.bfloat16),
            ((2048,), torch.float32),
        ):
            tensor = torch.rand(shape).to(dtype)
            tensors[f"layers.{number}.{len(tensors) % 3}"] = tensor
            left -= tensor.nbytes
        number += 1
    return tensors


def shards(tensors: dict[str, torch.Tensor]) -> list[Shard]:
    return [
        Shard.of(key, t, global_shape=tuple(t.shape), offset=(0,) * t.dim())
        for key, t in tensors.items()
    ]


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def report(
    figure: str, ours: Sequence[float], floor: Sequence[float], *, total: bool = False
) -> None:
    ratios = sorted(a / b for a, b in zip(ours, floor, strict=True))
    fields = {
        "figure": figure,
        "value": round(sum(ours) / sum(floor) if total else statistics.median(ratios), 4),
        "unit": "x",
        "low": round(ratios[0], 4),
        "high": round(ratios[-1], 4),
        "n": len(ratios),
    }
    print(json.dumps(fields), flush=True)


class Memcpy:
    """The floor: the state copied into warm memory, tensor by tensor as one flat copy."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        total = sum(t.nbytes for t in tensors.values())
        self._source = torch.zeros(total, dtype=torch.uint8)
        self._target = torch.zeros(total, dtype=torch.uint8)

    def seconds(self) -> float:
        return seconds(lambda: self._target.copy_(self._source))


class Compute:
    """A microbatch that takes a given time: real matrix products on all of torch's threads."""

    def __init__(self, goal_s: float) -> None:
        self._a, self._b = torch.rand(512, 512), torch.rand(512, 512)
        once = min(seconds(lambda: self._a @ self._b) for _ in range(20))
        self._repeats = max(1, int(goal_s / once))

    def __call__(self) -> None:
        for _ in range(self._repeats):
            self._a @ self._b


def measure_whole(
    tensors: dict[str, torch.Tensor], saver: AsyncSaver, folder: Path, runs: int
) -> None:
    parts, memcpy = {"model": shards(tensors)}, Memcpy(tensors)
    saver.prepare(parts)
    ours, floor = [], []
    for _ in range(runs):
        memcpy.seconds()
        before = memcpy.seconds()
        ours.append(seconds(lambda: async_save(parts, checkpoint_id=folder / "ours", saver=saver)))
        floor.append((before + memcpy_after(saver, memcpy)) / 2)
    report("unified_ckpt_stall_first", ours[:1], floor[:1])
    report("unified_ckpt_stall_async", ours, floor)
    report("unified_ckpt_stall_async_total", ours, floor, total=True)


def measure_dcp(tensors: dict[str, torch.Tensor], folder: Path, runs: int) -> None:
    """torch's `async_save` of the same tensors against the same floor."""
    memcpy = Memcpy(tensors)
    peer, floor = [], []
    for run in range(runs):
        memcpy.seconds()
        floor.append(memcpy.seconds())
        started = time.perf_counter()
        outcome = dcp_save(tensors, folder / f"dcp-{run}")
        peer.append(time.perf_counter() - started)
        outcome.result()
    report("unified_ckpt_stall_dcp_first", peer[:1], floor[:1])
    report("unified_ckpt_stall_dcp", peer, floor)


def make_module(mib: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A module and its AdamW after a step; both together have about that size."""
    width = 1024
    count = max(1, (mib << 20) // (3 * 4 * width * width))  # weight and two moments in fp32
    module = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(count)))
    optimizer = torch.optim.AdamW(module.parameters())
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return module, optimizer


def measure_module(mib: int, saver: AsyncSaver, folder: Path, runs: int) -> None:
    """As `measure_whole`, of live objects: their state is taken apart inside of the stall."""
    module, optimizer = make_module(mib)
    state = {"model": module, "optimizer": optimizer}
    moments = [state[name] for state in optimizer.state.values() for name in state]
    tensors = [*module.parameters(), *moments]
    memcpy = Memcpy({str(number): tensor for number, tensor in enumerate(tensors)})
    saver.prepare(state)
    ours, floor = [], []
    for _ in range(runs):
        memcpy.seconds()
        before = memcpy.seconds()
        ours.append(seconds(lambda: async_save(state, checkpoint_id=folder / "live", saver=saver)))
        floor.append((before + memcpy_after(saver, memcpy)) / 2)
    report("unified_ckpt_stall_module_first", ours[:1], floor[:1])
    report("unified_ckpt_stall_module", ours, floor)


def memcpy_after(saver: AsyncSaver, memcpy: Memcpy) -> float:
    saver.wait()
    return memcpy.seconds()


def dcp_save(tensors: dict[str, torch.Tensor], path: Path) -> "Future[Any]":
    outcome = dcp.async_save(dict(tensors), checkpoint_id=path)
    return outcome if isinstance(outcome, Future) else outcome.upload_completion


def measure_chunked(
    tensors: dict[str, torch.Tensor], saver: AsyncSaver, folder: Path, runs: int
) -> None:
    parts, memcpy = {"model": shards(tensors)}, Memcpy(tensors)
    zero_cost = ZeroCostSaver(saver, num_microbatches=MICROBATCHES)
    zero_cost.prepare(parts)
    memcpy.seconds()
    microbatch = Compute(4 * memcpy.seconds() / MICROBATCHES)
    stalls, longer, floor = [], [], []

    def step(checkpoint_id: Path | None) -> float:
        started = time.perf_counter()
        if checkpoint_id is not None:
            zero_cost.begin_save(parts, checkpoint_id=checkpoint_id)
        for _ in range(MICROBATCHES):
            zero_cost.offload_chunk()
            microbatch()
        zero_cost.finish()
        return time.perf_counter() - started

    for _ in range(runs):
        before = memcpy.seconds()
        zero_cost.stall_s = 0.0
        with_save = step(folder / "chunked")
        stalls.append(zero_cost.stall_s)
        floor.append((before + memcpy_after(saver, memcpy)) / 2)
        longer.append(with_save - step(None))
    zero_cost.close()
    report("unified_ckpt_stall_chunked_first", stalls[:1], floor[:1])
    report("unified_ckpt_stall_chunked", stalls, floor)
    report("unified_ckpt_stall_chunked_total", stalls, floor, total=True)
    report("unified_ckpt_step_longer_by", longer, floor)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure whole saves, those of live objects, and chunked ones."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mib", type=int, default=512, help="size of the state")
    parser.add_argument("--runs", type=int, default=15)
    arguments = parser.parse_args(argv)
    tensors = make_state(arguments.mib)
    with tempfile.TemporaryDirectory(prefix="unified-ckpt-bench-", dir=Path.cwd()) as temporary:
        folder = Path(temporary)
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        with AsyncSaver(config=AsyncSaverConfig()) as saver:
            measure_whole(tensors, saver, folder, arguments.runs)
        with AsyncSaver(config=AsyncSaverConfig()) as saver:
            measure_module(arguments.mib, saver, folder, arguments.runs)
        with AsyncSaver(config=AsyncSaverConfig()) as saver:
            measure_chunked(tensors, saver, folder, arguments.runs)
        measure_dcp(tensors, folder, arguments.runs)
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
