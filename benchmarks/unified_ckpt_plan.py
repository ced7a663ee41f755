"""Planning a save of thousands of ranks, and the memory that it takes in each of them.

4,096 virtual ranks on nodes of 8, each with 108 boxes, 442,368 in all: 36 parameters and their two
moments, sharded over all ranks; one copy on each node, sharded inside of it; experts whose every
tensor is held by a few ranks. A rank is given what all ranks have told (`Description.layout`), and
plans in a process of its own: CPU time and the growth of its resident memory, from what it was told
to the pieces of the files that it writes. The worst of the layouts counts.

    python benchmarks/unified_ckpt_plan.py --ranks 4096
"""

import argparse
import json
import multiprocessing
import random
import sys
import time
from collections.abc import Callable, Sequence

from ranktest.memory import forget_peak, peak_resident_bytes, resident_bytes
from unified_ckpt import Box, SaveOptions
from unified_ckpt.geometry import BoxMeta
from unified_ckpt.plans.columns import encode_boxes
from unified_ckpt.saving.described import plan_layouts

RANKS_PER_NODE = 8
NUM_PARAMETERS = 36
STATES = (("model", ""), ("optimizer", "/moment1"), ("optimizer", "/moment2"))


def fully_sharded(rank: int, num_ranks: int) -> list[tuple[str, Box]]:
    """One box of every parameter on each rank, as FSDP over all of them has it."""
    rows = 4 * num_ranks
    return [
        (f"model.layers.{i}.mlp.down_proj.weight", Box((rows, 4096), (4 * rank, 0), (4, 4096)))
        for i in range(NUM_PARAMETERS)
    ]


def node_copies(rank: int, num_ranks: int) -> list[tuple[str, Box]]:
    """Sharded over the ranks of a node, with a copy on each node, as HSDP has it."""
    del num_ranks
    box = Box((4096, 4096), (512 * (rank % RANKS_PER_NODE), 0), (512, 4096))
    return [(f"model.layers.{i}.self_attn.o_proj.weight", box) for i in range(NUM_PARAMETERS)]


def experts(rank: int, num_ranks: int) -> list[tuple[str, Box]]:
    """Twelve experts of three tensors on each rank; every expert is held by 64 of them."""
    groups = max(1, num_ranks // 64)
    return [
        (f"model.layers.{i}.mlp.experts.{rank % groups}.{name}.weight", Box.whole((1408, 2048)))
        for i in range(NUM_PARAMETERS // 3)
        for name in ("gate_proj", "up_proj", "down_proj")
    ]


LAYOUTS: dict[str, Callable[[int, int], list[tuple[str, Box]]]] = {
    "fully_sharded": fully_sharded,
    "node_copies": node_copies,
    "experts": experts,
}


def layout_of(boxes: list[tuple[str, Box]]) -> bytes:
    """Return what a rank with these parameters and their moments tells the others."""
    parts: dict[str, list[BoxMeta]] = {}
    for part, suffix in STATES:
        parts.setdefault(part, []).extend(
            BoxMeta(key + suffix, "BF16" if part == "model" else "F32", box) for key, box in boxes
        )
    head = {
        "options": SaveOptions().to_json(),
        "one_writer": False,
        "flat_keys": {},
        "aliases": {},
    }
    return json.dumps(head).encode() + b"\n" + encode_boxes(parts)


def plan_once(small: Sequence[bytes], layouts: Sequence[bytes], rank: int) -> dict[str, float]:
    """Plan in this process, with all that a rank needs of it; return seconds of CPU and MiB."""
    nodes = [f"node-{r // RANKS_PER_NODE}" for r in range(len(layouts))]
    plan_layouts(small, nodes[: len(small)])  # torch starts
    forget_peak()
    before = resident_bytes()
    begin = time.process_time()
    planned = plan_layouts(layouts, nodes)
    mine = planned.plan.files_of(rank)
    num_pieces = sum(len(file.pieces) for file in mine)
    seconds = time.process_time() - begin
    peak = peak_resident_bytes()
    over = [
        file.name
        for file in mine
        if len({writer // RANKS_PER_NODE for writer in (file.owner, *file.writers)}) > 1
    ]
    return {
        "seconds": seconds,
        "mib": (peak - before) / (1 << 20),
        "files": len(planned.plan.names),
        "pieces": num_pieces,
        "over_nodes": len(over),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Plan each layout in processes of their own; print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args(argv)
    context = multiprocessing.get_context("spawn")
    worst: dict[str, list[float]] = {"seconds": [], "mib": []}
    for name, boxes_of in LAYOUTS.items():
        layouts = [layout_of(boxes_of(r, arguments.ranks)) for r in range(arguments.ranks)]
        told = sum(map(len, layouts))
        small = [layout_of(boxes_of(r, RANKS_PER_NODE)) for r in range(RANKS_PER_NODE)]
        rounds = []
        for _ in range(arguments.rounds):
            with context.Pool(1) as pool:
                rank = random.randrange(arguments.ranks)
                rounds.append(pool.apply(plan_once, (small, layouts, rank)))
        print(f"{name}: told {told} bytes, {rounds}", file=sys.stderr)
        for figure, found in worst.items():
            found.append(sorted(each[figure] for each in rounds)[len(rounds) // 2])
    for figure, unit in (("seconds", "s"), ("mib", "MiB")):
        low, high = min(worst[figure]), max(worst[figure])
        line = {"figure": f"unified_ckpt_plan_{figure}", "value": round(high, 3), "unit": unit}
        print(json.dumps({**line, "n": len(LAYOUTS), "low": round(low, 3), "high": round(high, 3)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
