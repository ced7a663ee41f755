import math
import random
from pathlib import Path

import pytest
import torch

from ranktest import run_ranks
from unified_ckpt import Box, Shard, load, save
from unified_ckpt.geometry.flat import flat_boxes
from unified_ckpt.geometry.regions import check_tiling
from unified_ckpt.geometry.tensors.memory import narrow_box


def test_a_flat_range_is_few_boxes_whose_elements_follow_each_other() -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    for _ in range(300):
        shape = tuple(rng.randint(1, 5) for _ in range(rng.randint(0, 4)))
        numbers = torch.arange(math.prod(shape)).view(shape)
        begin, end = sorted(rng.randint(0, numbers.numel()) for _ in range(2))
        boxes = flat_boxes(shape, begin, end)
        found = [n for box in boxes for n in narrow_box(numbers, *box).flatten().tolist()]
        assert found == list(range(begin, end)), seed
        assert len(boxes) <= max(1, 2 * len(shape) - 1), seed


def test_flat_ranges_of_all_ranks_tile_the_tensor() -> None:
    shape = (3, 4, 5)
    cuts = [0, 7, 7, 31, 60]
    boxes = [b for i in range(4) for b in flat_boxes(shape, cuts[i], cuts[i + 1])]
    assert check_tiling(shape, boxes) is None


def test_a_range_outside_the_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(2, 7\) does not lie in the 6 elements"):
        flat_boxes((2, 3), 2, 7)
    with pytest.raises(ValueError, match=r"flattened_range \(0, 7\)"):
        Shard(key="w", tensor=torch.zeros(7), box=Box((2, 3), (0, 0), (2, 3), (0, 7)))


def test_a_flat_shard_is_boxes_that_view_its_memory() -> None:
    memory = torch.arange(20.0)[::2]  # every second element: any strided view will do
    shard = Shard(key="w", tensor=memory, box=Box((6, 6), (1, 2), (4, 3), (2, 12), replica_id=3))
    assert shard.box.numel == 10
    boxes = shard.boxes()
    assert [b.box for b in boxes] == shard.box.unflattened()
    assert [b.box.offset for b in boxes] == [(1, 4), (2, 2)]
    assert [v for b in boxes for v in b.tensor.flatten().tolist()] == memory.tolist()
    boxes[1].tensor.fill_(-1)
    assert (memory[1:] == -1).all() and memory[0] == 0
    assert {b.box.replica_id for b in boxes} == {3}


def test_an_empty_flat_range_still_names_its_tensor() -> None:
    empty = Shard(key="w", tensor=torch.zeros(0), box=Box((2, 3), (0, 0), (2, 3), (6, 6)))
    assert [tuple(b.tensor.shape) for b in empty.boxes()] == [(0, 3)]
    scalar = Shard(key="s", tensor=torch.zeros(0), box=Box((), (), (), (0, 0)))
    assert scalar.boxes() == []


DTYPES = [
    torch.bool, torch.int8, torch.uint16, torch.int64, torch.bfloat16, torch.complex64,
    torch.float8_e4m3fn, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2,
]  # fmt: skip


def test_every_dtype_moves_between_flat_ranges_and_boxes(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    wholes, cuts = {}, {}
    for dtype in DTYPES:
        shape = (3, rng.randint(1, 5), 4)
        raw = torch.randint(0, 2, (*shape[:-1], 4 * dtype.itemsize), dtype=torch.uint8)
        wholes[str(dtype)] = raw.view(dtype)
        numel = raw.view(dtype).numel()
        cuts[str(dtype)] = [0, *sorted(rng.randint(0, numel) for _ in range(2)), numel]

    def flat(key: str, rank: int, memory: torch.Tensor) -> Shard:
        low, high = cuts[key][rank], cuts[key][rank + 1]
        shape = tuple(wholes[key].shape)
        return Shard(
            key=key,
            tensor=memory.reshape(-1)[low:high],
            box=Box(shape, (0, 0, 0), shape, (low, high)),
        )

    def fn(rank: int, world_size: int) -> None:
        shards = [flat(key, rank, whole) for key, whole in wholes.items()]
        save({"model": shards}, checkpoint_id=tmp_path / "c")
        for key, whole in wholes.items():
            size = whole.element_size()
            back = torch.zeros(whole.numel() * size, dtype=torch.uint8).view(whole.dtype)
            want = flat(key, rank, back.view(whole.shape))
            load([want], checkpoint_id=tmp_path / "c")
            begin, end = (n * size for n in want.box.flattened_range or (0, 0))
            found = want.tensor.contiguous().view(torch.uint8)
            truth = whole.reshape(-1).view(torch.uint8)[begin:end]
            assert torch.equal(found, truth), (seed, key)

    run_ranks(fn, 3)
    for key, whole in wholes.items():
        memory = torch.zeros(whole.numel() * whole.element_size(), dtype=torch.uint8)
        back = memory.view(whole.dtype).view(whole.shape)
        load({key: back}, checkpoint_id=tmp_path / "c")
        assert torch.equal(memory, whole.reshape(-1).view(torch.uint8)), (seed, key)
