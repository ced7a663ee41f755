"""Random pairs of layouts: saved under one by real ranks, loaded under another, bit for bit."""

import itertools
import random
from pathlib import Path

import torch

from ranktest import run_ranks
from unified_ckpt import Shard, load, plan_save, save, verify_checkpoint
from unified_ckpt.memory import narrow_box

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn]
Box = tuple[tuple[int, ...], tuple[int, ...]]


def random_tensors(rng: random.Random) -> dict[str, torch.Tensor]:
    tensors = {}
    for number in range(rng.randint(1, 6)):
        shape = [rng.randint(0, 7) for _ in range(rng.randint(0, 4))]
        dtype = rng.choice(DTYPES)
        raw = torch.tensor(
            [rng.randint(0, 1) for _ in range(torch.Size(shape).numel() * dtype.itemsize)]
        )
        tensors[f"w{number}"] = raw.to(torch.uint8).view(dtype).view(shape)
    return tensors


def random_layout(
    rng: random.Random, tensors: dict[str, torch.Tensor], world_size: int
) -> list[list[tuple[str, Box]]]:
    """Cut every tensor into a random grid; each cell goes to some ranks, empty boxes to others."""
    held: list[list[tuple[str, Box]]] = [[] for _ in range(world_size)]
    for key, tensor in tensors.items():
        edges = [
            sorted({0, n, *(rng.randint(0, n) for _ in range(rng.randint(0, 2)))})
            for n in tensor.shape
        ]
        grid = [list(itertools.pairwise(e)) or [(0, 0)] for e in edges]
        for cell in itertools.product(*grid):
            where = (tuple(a for a, _ in cell), tuple(b - a for a, b in cell))
            for rank in rng.sample(range(world_size), rng.randint(1, world_size)):
                held[rank].append((key, where))
        if tensor.dim() and rng.random() < 0.3:
            shape = (0, *tensor.shape[1:])
            held[rng.randrange(world_size)].append(
                (key, ((tensor.shape[0], *(0,) * (tensor.dim() - 1)), shape))
            )
    for boxes in held:
        rng.shuffle(boxes)
    return held


def shards_of(
    boxes: list[tuple[str, Box]], tensors: dict[str, torch.Tensor], fill: bool
) -> list[Shard]:
    shards = []
    for key, (offset, shape) in boxes:
        tensor = narrow_box(tensors[key], offset, shape)
        if not fill:
            tensor = torch.zeros_like(
                tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
            )
            tensor = tensor.view(tensors[key].dtype)
        shards.append(
            Shard(key=key, tensor=tensor, global_shape=tuple(tensors[key].shape), offset=offset)
        )
    return shards


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    as_bytes = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(*as_bytes)


def check_pair(seed: int, folder: Path) -> None:
    rng = random.Random(seed)
    tensors = random_tensors(rng)
    save_ranks, load_ranks = rng.choice([1, 2, 3, 4]), rng.choice([1, 2, 3, 4])
    before = random_layout(rng, tensors, save_ranks)
    after = random_layout(rng, tensors, load_ranks)
    max_shard_bytes = rng.choice([1, 40, 10**9])
    target = folder / str(seed)

    def saves(rank: int, world_size: int) -> None:
        shards = shards_of(before[rank], tensors, fill=True)
        save({"model": shards}, checkpoint_id=target, max_shard_bytes=max_shard_bytes)

    run_ranks(saves, save_ranks)
    assert verify_checkpoint(target).problems == (), seed
    for boxes in after:
        wants = shards_of(boxes, tensors, fill=False)
        load(wants, checkpoint_id=target)
        for want, (key, where) in zip(wants, boxes, strict=True):
            assert same_bits(want.tensor, narrow_box(tensors[key], *where)), (seed, key, where)


def test_random_pairs_of_layouts_are_bit_exact(tmp_path: Path) -> None:
    for _ in range(12):
        check_pair(random.randrange(2**32), tmp_path)


def test_random_layouts_are_planned_with_every_byte_written_once() -> None:
    for _ in range(100):
        seed = random.randrange(2**32)
        rng = random.Random(seed)
        tensors = random_tensors(rng)
        held = random_layout(rng, tensors, rng.randint(1, 6))
        plan = plan_save(
            [{"model": [s.meta for s in shards_of(boxes, tensors, fill=True)]} for boxes in held],
            max_shard_bytes=rng.choice([1, 50, 10**6]),
            chunk_bytes=rng.choice([1, 7, 64]),
        )
        for file in plan.files:
            covered = list(range(len(file.header)))
            for piece in file.pieces:
                for start in piece.region.run_starts():
                    covered += range(start, start + piece.region.run_bytes)
            assert sorted(covered) == list(range(file.num_bytes)), seed
        keys = [entry.key for file in plan.files for entry in file.entries]
        assert sorted(keys) == sorted(tensors), seed
