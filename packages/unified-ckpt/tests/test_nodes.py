"""No file has writers of two nodes, whatever ranks hold."""

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Iterator

import pytest

from unified_ckpt import Box
from unified_ckpt.geometry import BoxMeta
from unified_ckpt.plans import SavePlan, plan_save

Held = list[dict[str, list[BoxMeta]]]


def grid(rng: random.Random) -> tuple[tuple[int, ...], list[tuple[tuple, tuple]]]:
    """A shape, and boxes that tile it: cuts along each dim."""
    shape = tuple(rng.randint(1, 9) for _ in range(rng.randint(1, 3)))
    edges = [
        sorted({0, n, *(rng.randrange(n + 1) for _ in range(rng.choice([0, 0, 1, 3])))})
        for n in shape
    ]
    boxes: list[tuple[tuple, tuple]] = [((), ())]
    for cuts in edges:
        boxes = [
            ((*offset, a), (*size, b - a))
            for offset, size in boxes
            for a, b in itertools.pairwise(cuts)
        ]
    return shape, boxes


def random_held(rng: random.Random, num_ranks: int, num_tensors: int) -> Held:
    held: Held = [defaultdict(list) for _ in range(num_ranks)]
    for number in range(num_tensors):
        part = rng.choice(["model", "optimizer"])
        shape, boxes = grid(rng)
        near = rng.randrange(num_ranks)
        for place, (offset, size) in enumerate(boxes):
            kind = rng.randrange(4)
            ranks = [rng.randrange(num_ranks) for _ in range(rng.choice([1, 2, 5]))]
            if kind == 0:
                ranks = [(near + place) % num_ranks]
            elif kind == 1:
                ranks = [*range(place % 8 % num_ranks, num_ranks, 8)]
            for rank in ranks:
                replica = rng.choice([None, 0, rank]) if number % 7 == 0 else None
                box = Box(shape, offset, size, replica_id=replica)
                held[rank][part].append(BoxMeta(f"w{number}", "F32", box))
    return held


def boxes_in(held: Held) -> Iterator[tuple[int, tuple, float]]:
    """Yield (rank, part and box, replica) of every box that is not empty."""
    for rank, parts in enumerate(held):
        for part, metas in parts.items():
            for meta in metas:
                replica = math.inf if meta.box.replica_id is None else meta.box.replica_id
                if meta.box.numel:
                    yield rank, (part, meta.key, meta.box.offset, meta.box.local_shape), replica


def check(plan: SavePlan, held: Held, nodes: list[str] | None) -> None:
    """Every box is written once by who holds it, and each file on one node."""
    lowest: dict[tuple, float] = defaultdict(lambda: math.inf)
    for _, place, replica in boxes_in(held):
        lowest[place] = min(lowest[place], replica)
    may_write: dict[tuple, set[int]] = defaultdict(set)
    for rank, place, replica in boxes_in(held):
        if replica == lowest[place]:
            may_write[place].add(rank)
    load = [0] * len(held)
    for file in plan.files:
        writers = {box.rank for tensor in file.tensors for box in tensor.boxes}
        assert writers == file.writers and file.owner == min(writers, default=file.owner)
        assert nodes is None or len({nodes[rank] for rank in (*writers, file.owner)}) == 1
        for tensor, box in [(t, b) for t in file.tensors for b in t.boxes]:
            meta = held[box.rank][file.part][box.shard_index]
            place = (file.part, meta.key, meta.box.offset, meta.box.local_shape)
            assert box.rank in may_write.pop(place), place
            load[box.rank] += 4 * meta.box.numel
            is_whole = tensor.key == meta.key
            assert box.offset == (meta.box.offset if is_whole else (0,) * len(box.shape))
            assert is_whole or tensor.key.startswith(f"{meta.key}@")
    assert not may_write and tuple(load) == plan.rank_bytes
    for rank in range(len(held)):
        mine = [file.name for file in plan.files if rank in file.writers or file.owner == rank]
        assert [file.name for file in plan.files_of(rank)] == mine


@pytest.mark.parametrize("num_ranks", [1, 3, 16, 64])
def test_every_box_is_written_once_and_no_file_has_writers_of_two_nodes(num_ranks: int) -> None:
    for _ in range(12):
        seed = random.randrange(2**32)
        print(f"seed {seed}")
        rng = random.Random(seed)
        held = random_held(rng, num_ranks, num_tensors=30)
        nodes = [f"n{rng.randrange(max(1, num_ranks // 4))}" for _ in range(num_ranks)]
        limit = rng.choice([10**9, 200])
        check(plan_save(held, max_shard_bytes=limit, nodes=nodes), held, nodes)
        check(plan_save(held, max_shard_bytes=limit), held, None)


def test_no_file_of_4096_ranks_has_writers_of_two_nodes() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    held = random_held(rng, 4096, num_tensors=60)
    nodes = [f"n{rank // 8}" for rank in range(4096)]
    plan = plan_save(held, nodes=nodes)
    for file in plan.files:
        assert len({nodes[rank] for rank in (*file.writers, file.owner)}) == 1, file.name


def rows(key: str, num: int, index: int) -> BoxMeta:
    return BoxMeta(key, "F32", Box.whole((8 * num, 4)).chunk(0, num=num, index=index))


def test_a_tensor_that_a_node_holds_all_of_is_stored_whole() -> None:
    nodes = ["a", "a", "b", "b"]
    copies = [{"model": [rows(f"w{i}", 2, r % 2) for i in range(6)]} for r in range(4)]
    plan = plan_save(copies, nodes=nodes)
    assert {t.key for f in plan.files for t in f.tensors} == {f"w{i}" for i in range(6)}
    assert plan.rank_bytes == (384, 384, 384, 384)


def test_a_tensor_that_no_node_holds_all_of_is_stored_in_boxes() -> None:
    held = [{"model": [rows("w", 4, r), rows("here", 1, 0)]} for r in range(4)]
    plan = plan_save(held, nodes=["a", "a", "b", "b"])
    keys = {t.key for f in plan.files for t in f.tensors}
    assert keys == {"here", *(f"w@{8 * r}:{8 * r + 8},0:4@32,4" for r in range(4))}
    shared = plan_save(held)
    assert sorted(t.key for f in shared.files for t in f.tensors) == ["here", "w"]
