import random

import pytest

from unified_ckpt import Box
from unified_ckpt.errors import CheckpointValueError
from unified_ckpt.geometry import BoxMeta, check_tiling
from unified_ckpt.plans.columns.box_table import BoxTable, encode_boxes
from unified_ckpt.plans.columns.held_boxes import HeldBoxes


def cut(rng: random.Random, box: Box, times: int) -> list[Box]:
    boxes = [box]
    for _ in range(times):
        place = rng.randrange(len(boxes))
        dims = [d for d, n in enumerate(boxes[place].local_shape) if n > 1]
        if dims:
            dim, old = rng.choice(dims), boxes[place]
            at = rng.randrange(1, old.local_shape[dim])
            rest = old.local_shape[dim] - at
            boxes[place] = old.cut(dim, begin=0, length=at)
            boxes.append(old.cut(dim, begin=at, length=rest))
    return boxes


def spoiled(rng: random.Random, boxes: list[Box]) -> list[Box]:
    """Leave one out, make one smaller, or move one."""
    place = rng.randrange(len(boxes))
    box, rest = boxes[place], boxes[:place] + boxes[place + 1 :]
    kind = rng.randrange(3)
    dims = [d for d, n in enumerate(box.local_shape) if n > 1]
    if kind == 0 or not dims:
        return rest
    dim = rng.choice(dims)
    if kind == 1:
        return [*rest, box.cut(dim, begin=1, length=box.local_shape[dim] - 1)]
    offset = list(box.offset)
    offset[dim] += -1 if offset[dim] else 1
    if offset[dim] + box.local_shape[dim] > box.global_shape[dim]:
        return rest
    return [*rest, Box(box.global_shape, tuple(offset), box.local_shape)]


def test_holes_and_overlaps_are_found_where_check_tiling_finds_them() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    bad = 0
    for _ in range(150):
        tensors = {}
        for number in range(rng.randint(1, 6)):
            shape = tuple(rng.randint(1, 7) for _ in range(rng.randint(0, 4)))
            boxes = cut(rng, Box.whole(shape), rng.choice([0, 1, 8]))
            tensors[f"w{number}"] = spoiled(rng, boxes) if rng.random() < 0.15 else boxes
        expected = [
            key
            for key, boxes in tensors.items()
            if boxes
            and check_tiling(boxes[0].global_shape, [(b.offset, b.local_shape) for b in boxes])
        ]
        metas = [BoxMeta(key, "F32", box) for key, boxes in tensors.items() for box in boxes]
        rng.shuffle(metas)
        held = [{"model": metas[i::3]} for i in range(3)]
        table = BoxTable.of(map(encode_boxes, held))
        if expected:
            bad += 1
            with pytest.raises(CheckpointValueError) as caught:
                HeldBoxes.of(table)
            assert any(f"model {key!r} " in str(caught.value) for key in expected), seed
        else:
            HeldBoxes.of(table)
    assert bad > 5, seed


def test_a_tensor_of_many_dims_that_are_cut_is_checked_too() -> None:
    box = Box.whole((2,) * 9)
    boxes = [box]
    for dim in range(9):
        boxes = [b.chunk(dim, num=2, index=i) for b in boxes for i in (0, 1)]
    metas = [BoxMeta("w", "F32", b) for b in boxes]
    held = HeldBoxes.of(BoxTable.of([encode_boxes({"model": metas})]))
    assert len(held.row) == 512
    with pytest.raises(CheckpointValueError, match="no rank holds 1 of its 512 elements"):
        HeldBoxes.of(BoxTable.of([encode_boxes({"model": metas[1:]})]))


def test_of_replicas_the_lowest_counts_and_each_rank_once() -> None:
    def meta(replica: int | None) -> BoxMeta:
        return BoxMeta("w", "F32", Box((4,), (0,), (4,), replica_id=replica))

    ranks = [[meta(None)], [meta(2)], [meta(1), meta(1)], [meta(1), meta(0)], [meta(0)]]
    table = BoxTable.of(encode_boxes({"model": metas}) for metas in ranks)
    held = HeldBoxes.of(table)
    assert table.rank[held.holder].tolist() == [3, 4] and table.index[held.holder].tolist() == [
        1,
        0,
    ]
