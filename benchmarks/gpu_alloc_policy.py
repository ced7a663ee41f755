"""How much memory a policy needs: smallest device on which a trace runs, over the peak of live
bytes.

    python benchmarks/gpu_alloc_policy.py [--seeds 5] [--steps 4]

Peak reserved memory without a limit would favour lazy policies, so both sides are measured by
bisection of the device's size, to one 2 MiB page. The peer is a model, written here, of the rules
of torch's native caching allocator (sizes and conditions as in c10/cuda/CUDACachingAllocator: 512 B
rounding, 1 MiB small requests in 2 MiB segments, 20 MiB segments below 10 MiB, 2 MiB rounding
above, no split that leaves 1 MiB or less of a large block, release of whole cached segments before
giving up). It is not torch itself, which needs a GPU. The floor is 1.000. Traces come from
gpu_alloc_moe_trace, seeds are fresh and printed.
"""

import argparse
import json
import random
import statistics
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence

from gpu_alloc_moe_trace import SHAPES, moe_trace

from gpu_alloc import AllocatorConfig, TraceEvent, minimal_capacity, replay

MIB = 1 << 20
PAGE = 2 * MIB


class TorchLikePolicy:
    """The placement rules named above, over a device of `capacity_bytes`; blocks are [segment,
    offset, size].
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity = capacity_bytes
        self.reserved = 0
        self.segments: dict[int, int] = {}
        self.free_lists: tuple[list[tuple[int, int, int]], ...] = ([], [])
        self.free_at: dict[tuple[int, int], int] = {}
        self.free_end: dict[tuple[int, int], int] = {}
        self.used: dict[int, tuple[int, int, int, bool]] = {}
        self.next_segment = 0

    def alloc(self, block_id: int, requested: int) -> bool:
        """Place a request; False when the device is full."""
        size = max(512, -(-requested // 512) * 512)
        small = size <= MIB
        found = self._take(size, small)
        if found is None:
            segment_size = (
                PAGE if small else 20 * MIB if size < 10 * MIB else -(-size // PAGE) * PAGE
            )
            if self.reserved + segment_size > self.capacity:
                self._release_cached()
                if self.reserved + segment_size > self.capacity:
                    return False
            self.segments[self.next_segment] = segment_size
            self.reserved += segment_size
            found = (segment_size, self.next_segment, 0)
            self.next_segment += 1
        block_size, segment, offset = found
        rest = block_size - size
        if rest >= 512 if small else rest > MIB:
            self._put(rest, segment, offset + size, small)
            block_size = size
        self.used[block_id] = (segment, offset, block_size, small)
        return True

    def free(self, block_id: int) -> None:
        """Take a block back and merge it with its free neighbours."""
        segment, offset, size, small = self.used.pop(block_id)
        after = self.free_at.get((segment, offset + size))
        if after is not None:
            self._drop(after, segment, offset + size, small)
            size += after
        before = self.free_end.get((segment, offset))
        if before is not None:
            self._drop(before, segment, offset - before, small)
            offset, size = offset - before, size + before
        self._put(size, segment, offset, small)

    def _take(self, size: int, small: bool) -> tuple[int, int, int] | None:
        blocks = self.free_lists[small]
        position = bisect_left(blocks, (size, -1, -1))
        if position == len(blocks):
            return None
        found = blocks[position]
        self._drop(*found, small)
        return found

    def _put(self, size: int, segment: int, offset: int, small: bool) -> None:
        insort(self.free_lists[small], (size, segment, offset))
        self.free_at[segment, offset] = size
        self.free_end[segment, offset + size] = size

    def _drop(self, size: int, segment: int, offset: int, small: bool) -> None:
        blocks = self.free_lists[small]
        del blocks[bisect_left(blocks, (size, segment, offset))]
        del self.free_at[segment, offset], self.free_end[segment, offset + size]

    def _release_cached(self) -> None:
        for small in (False, True):
            for size, segment, offset in list(self.free_lists[small]):
                if size == self.segments[segment]:
                    self._drop(size, segment, offset, small)
                    self.reserved -= self.segments.pop(segment)


def torch_like_runs(trace: Sequence[TraceEvent], capacity_bytes: int) -> bool:
    policy = TorchLikePolicy(capacity_bytes)
    for event in trace:
        if event.action == "free":
            policy.free(event.block_id)
        elif not policy.alloc(event.block_id, event.size_bytes):
            return False
    return True


def bisect_capacity(runs: Callable[[int], bool], low_bytes: int) -> int:
    fails, works = low_bytes // PAGE - 1, 2 * low_bytes // PAGE
    while not runs(works * PAGE):
        fails, works = works, 2 * works
    while works - fails > 1:
        middle = (fails + works) // 2
        if runs(middle * PAGE):
            works = middle
        else:
            fails = middle
    return works * PAGE


def report(figure: str, values: list[float], unit: str = "x") -> None:
    record = {"figure": figure, "value": round(statistics.median(values), 4), "unit": unit}
    record |= {"low": round(min(values), 4), "high": round(max(values), 4), "n": len(values)}
    print(json.dumps(record))


def ours_pre_allocated(trace: Sequence[TraceEvent], live_bytes: int) -> int:
    """Smallest device when the large pool takes all but 32 MiB of it at the start."""

    def runs(capacity_bytes: int) -> bool:
        config = AllocatorConfig(large_pool_pre_alloc_in_mb=capacity_bytes // MIB - 32)
        return replay(trace, config, capacity_bytes).oom is None

    return bisect_capacity(runs, live_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the memory that policies need.")
    parser.add_argument("--seeds", type=int, default=3, help="fresh traces per model shape")
    parser.add_argument("--seed", type=int, default=None, help="first seed, to repeat a run")
    parser.add_argument("--steps", type=int, default=4)
    arguments = parser.parse_args()
    first = random.SystemRandom().randrange(1 << 30) if arguments.seed is None else arguments.seed
    ratios: dict[str, list[float]] = {}
    for name, shape in SHAPES.items():
        for seed in range(first, first + arguments.seeds):
            trace = moe_trace(shape, seed=seed, steps=arguments.steps)
            live = replay(trace, AllocatorConfig()).peak_live_bytes
            grown = minimal_capacity(trace, AllocatorConfig())
            slab = ours_pre_allocated(trace, live)
            peer = bisect_capacity(lambda size, t=trace: torch_like_runs(t, size), live)
            for figure, value in (
                ("pre_allocated_over_live", slab / live),
                ("pre_allocated_over_torch_rules", slab / peer),
                ("default_over_torch_rules", grown / peer),
            ):
                ratios.setdefault(f"gpu_alloc_{figure}", []).append(value)
            print(
                f"{name}, seed {seed}, {len(trace)} events, peak live {live / MIB:.0f} MiB; "
                f"smallest device: pre-allocated {slab / live:.3f}, default {grown / live:.3f}, "
                f"torch's rules {peer / live:.3f}"
            )
    for figure, values in ratios.items():
        report(figure, values)


if __name__ == "__main__":
    main()
