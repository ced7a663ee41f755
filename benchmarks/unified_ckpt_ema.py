"""The moving average of the saver process: is it exact, and does the trainer pay for it?

Exact: 1,000 updates on real saver processes, of bf16 weights in changing layouts of 1 to 3 ranks.
Each leg of the run resumes from the last checkpoint under another layout, in one leg in two a
saver is killed at a random moment; what is compared, bit for bit, is one process that does the
same updates in fp32. Pays: the trainer's stall with and without an average, in turns, whole
(`async_save`) and chunked over 8 microbatches.

    python benchmarks/unified_ckpt_ema.py --updates 1000 --mib 256 --runs 9
"""

import argparse
import json
import math
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from unified_ckpt_stall import Compute, Memcpy, make_state, report, seconds, shards

from ranktest import run_ranks
from unified_ckpt import AsyncSaver, AsyncSaverConfig, Shard, ZeroCostSaver, async_save, load
from unified_ckpt.errors import SaveError
from unified_ckpt.snapshots.average import EmaConfig

SHAPES = {"w": (37, 290), "v": (4001,), "s": ()}
LEGS = 10
MICROBATCHES = 8
EMA = EmaConfig(decay=0.999, warmup=True)
CONFIG = AsyncSaverConfig(ema=EMA, timeout_s=120.0, start_timeout_s=120.0, orphan_grace_s=1.0)


def weights(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {k: torch.randn(s, generator=generator).bfloat16() for k, s in SHAPES.items()}


def cut(tensors: dict[str, torch.Tensor], rank: int, ends: list[float]) -> list[Shard]:
    """Uneven rows of every tensor; a scalar is a replica."""
    held = []
    for key, tensor in tensors.items():
        rows = tensor.shape[0] if tensor.dim() else 0
        edges = [0, *(int(rows * end) for end in ends), rows]
        begin, end = (edges[rank], edges[rank + 1]) if tensor.dim() else (0, 0)
        local = tensor[begin:end] if tensor.dim() else tensor
        offset = (begin, *(0 for _ in tensor.shape[1:])) if tensor.dim() else ()
        held.append(Shard.of(key, local, global_shape=tuple(tensor.shape), offset=offset))
    return held


def run_leg(folder: Path, steps: range, resume: Path | None, seed: int) -> list[int]:
    """Do updates on some ranks and save; return the steps that were taken in."""
    rng = random.Random(seed)
    world_size = rng.randint(1, 3)
    ends = sorted(rng.random() for _ in range(world_size - 1))
    victim, kill_at = rng.randrange(world_size), rng.choice([-1, rng.choice(steps[:-2])])

    def fn(rank: int, world_size: int) -> list[int]:
        tensors, failed = weights(steps[0]), []
        state = {"model": cut(tensors, rank, ends)}
        with AsyncSaver(config=CONFIG) as saver:
            zero_cost = ZeroCostSaver(saver, num_microbatches=2)
            zero_cost.prepare(state)
            if resume is not None:
                saver.load_ema(resume)
            for step in steps:
                for key, tensor in weights(step).items():
                    tensors[key].copy_(tensor)
                try:
                    outcome = zero_cost.begin_save(state, checkpoint_id=None)
                except SaveError:
                    failed.append(step)
                    continue
                zero_cost.finish()
                if rank == victim and step == kill_at:
                    time.sleep(random.uniform(0.0, 0.003))
                    os.kill(saver.pid, signal.SIGKILL)
                if outcome.exception(timeout=120) is not None and world_size > 1:
                    failed.append(step)  # a rank alone agrees with itself: its next saver redoes it
            zero_cost.begin_save(state, checkpoint_id=folder, loss=math.nan)
            zero_cost.close()
            saver.wait(timeout_s=120)
        return failed

    outcomes = run_ranks(fn, world_size, timeout_s=500)
    # A snapshot was taken in on all ranks or on none: where it worked for one, it counts.
    skipped = set.intersection(*(set(failed) for failed in outcomes))  # type: ignore[call-overload]
    return [step for step in steps if step not in skipped]


def measure_exactness(updates: int, folder: Path) -> None:
    average: dict[str, torch.Tensor] = {}
    done, wrong, resume = 0, 0, None
    seeds = [random.randrange(2**32) for _ in range(LEGS)]
    print(f"seeds {seeds}", file=sys.stderr)
    for leg, seed in enumerate(seeds):
        steps = range(leg * updates // LEGS, (leg + 1) * updates // LEGS)
        target = folder / f"checkpoint-{leg}"
        for step in run_leg(target, steps, resume, seed):
            decay = min(EMA.decay, (1 + done) / (10 + done))
            for key, tensor in weights(step).items():
                if done:
                    change = (tensor.float() - average[key]) * (1.0 - decay)
                    average[key] = average[key] + change
                else:
                    average[key] = tensor.float()
            done += 1
        found = {key: torch.full(shape, math.nan) for key, shape in SHAPES.items()}
        load(shards(found), checkpoint_id=target, part="ema")
        wrong += sum(int((found[key] != average[key]).sum()) for key in SHAPES)
        resume = target
    fields = {"figure": "unified_ckpt_ema_wrong", "value": wrong, "low": wrong, "high": wrong}
    print(json.dumps({**fields, "unit": "elements", "n": done}), flush=True)


class Side:
    """A saver with or without an average, and the stalls that it caused."""

    def __init__(self, ema: EmaConfig | None, state: dict[str, list[Shard]], folder: Path) -> None:
        self.saver = AsyncSaver(config=AsyncSaverConfig(ema=ema))
        self.whole: list[float] = []
        self.chunked: list[float] = []
        self._state, self._folder = state, folder
        self._zero_cost = ZeroCostSaver(self.saver, num_microbatches=MICROBATCHES)
        self._zero_cost.prepare(state)

    def run(self, microbatch: Compute) -> None:
        """Save once whole and once in chunks."""
        place = self._folder / "checkpoint"
        work = partial(async_save, self._state, checkpoint_id=place, saver=self.saver)
        self.whole.append(seconds(work))
        self.saver.wait()
        self._zero_cost.stall_s = 0.0
        self._zero_cost.begin_save(self._state, checkpoint_id=place)
        for _ in range(MICROBATCHES):
            self._zero_cost.offload_chunk()
            microbatch()
        self._zero_cost.finish()
        self.chunked.append(self._zero_cost.stall_s)
        self.saver.wait()

    def close(self) -> None:
        """End the threads and the process."""
        self._zero_cost.close()
        self.saver.close()


def measure_stall(mib: int, runs: int, folder: Path) -> None:
    tensors = make_state(mib)
    state, memcpy = {"model": shards(tensors)}, Memcpy(tensors)
    memcpy.seconds()
    microbatch = Compute(4 * memcpy.seconds() / MICROBATCHES)
    sides = [Side(EMA, state, folder / "with"), Side(None, state, folder / "without")]
    for run in range(runs):
        for side in sides if run % 2 else reversed(sides):
            side.run(microbatch)
    for side in sides:
        side.close()
    report("unified_ckpt_ema_stall", sides[0].whole, sides[1].whole)
    report("unified_ckpt_ema_stall_chunked", sides[0].chunked, sides[1].chunked)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure exactness and stall."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--updates", type=int, default=1000)
    parser.add_argument("--mib", type=int, default=256, help="size of the state whose stall counts")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--only", choices=["exact", "stall"])
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="unified-ckpt-bench-", dir=Path.cwd()) as temporary:
        if arguments.only != "stall":
            measure_exactness(arguments.updates, Path(temporary))
        if arguments.only != "exact":
            measure_stall(arguments.mib, arguments.runs, Path(temporary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
