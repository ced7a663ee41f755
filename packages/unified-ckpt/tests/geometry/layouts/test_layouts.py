"""Random pairs of layouts: saved under one by real ranks, loaded under another, bit for bit."""

import itertools
import random
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from ranktest import run_ranks
from unified_ckpt import Shard, load, save, verify_checkpoint
from unified_ckpt.geometry import BoxMeta
from unified_ckpt.geometry.layouts.layouts import (
    Box,
    ParallelDegrees,
    ParameterRule,
    expert_shards,
    global_expert_keys,
    rank_box,
)
from unified_ckpt.geometry.tensors.memory import narrow_box
from unified_ckpt.options import SaveOptions
from unified_ckpt.plans import plan_save

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn]
Block = tuple[tuple[int, ...], tuple[int, ...]]


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
) -> list[list[tuple[str, Block]]]:
    """Cut every tensor into a random grid; each cell goes to some ranks, empty boxes to others."""
    held: list[list[tuple[str, Block]]] = [[] for _ in range(world_size)]
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
    boxes: list[tuple[str, Block]], tensors: dict[str, torch.Tensor], fill: bool
) -> list[Shard]:
    shards = []
    for key, (offset, shape) in boxes:
        tensor = narrow_box(tensors[key], offset, shape)
        if not fill:
            tensor = torch.zeros_like(
                tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
            )
            tensor = tensor.view(tensors[key].dtype)
        shards.append(Shard.of(key, tensor, global_shape=tuple(tensors[key].shape), offset=offset))
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
    options = SaveOptions(max_shard_bytes=rng.choice([1, 40, 10**9]))
    target = folder / str(seed)

    def saves(rank: int, world_size: int) -> None:
        shards = shards_of(before[rank], tensors, fill=True)
        save({"model": shards}, checkpoint_id=target, options=options)

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


RULES = {
    "dense": (ParameterRule(tp_dim=1), (9, 10)),
    "vocab": (ParameterRule(tp_dim=0, pp_stage=0), (11, 3)),
    "norm": (ParameterRule(pp_stage=1), (5,)),
    "experts": (ParameterRule(expert=True, tp_dim=2), (8, 3, 6)),
    "flat dense": (ParameterRule(tp_dim=0, sharding="flat"), (7, 5)),
    "flat experts": (ParameterRule(expert=True, tp_dim=1, sharding="flat"), (6, 5, 4)),
    "fsdp": (ParameterRule(sharding="dim0"), (13, 2)),
    "fsdp experts": (ParameterRule(expert=True, sharding="dim0"), (8, 4)),
    "owner": (ParameterRule(sharding="owner", owner=5), (4, 4)),
    "scalar": (ParameterRule(sharding="dim0"), ()),
}


def metas_of(rule: ParameterRule, shape: Block | tuple, degrees: ParallelDegrees) -> list[dict]:
    held = []
    for rank in range(degrees.world_size):
        box = rank_box(rule, shape, rank=rank, degrees=degrees)
        plain = [] if box is None else box.unflattened()
        held.append({"model": [BoxMeta("w", "F32", b) for b in plain]})
    return held


def test_the_boxes_of_all_ranks_tile_every_parameter_under_every_rule() -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    for _ in range(60):
        pp, tp, cp, dp = (rng.choice([1, 2, 3]) for _ in range(4))
        world = 2 * pp * tp * cp * dp
        stage = world // (2 * pp)
        ep = rng.choice([n for n in range(1, stage + 1) if stage % n == 0])
        etp = rng.choice([n for n in range(1, stage // ep + 1) if (stage // ep) % n == 0])
        degrees = ParallelDegrees(world_size=world, tp=tp, pp=2 * pp, cp=cp, ep=ep, etp=etp)
        for name, (rule, shape) in RULES.items():
            plan = plan_save(metas_of(rule, shape, degrees))  # raises at any hole or overlap
            assert plan.files[0].entries[0].shape == shape, (seed, name)
            assert sum(plan.rank_bytes) == 4 * torch.Size(shape).numel(), (seed, name)


def test_dense_parameters_and_experts_have_different_sharding_groups() -> None:
    degrees = ParallelDegrees(world_size=8, tp=2, ep=4)
    assert (degrees.dp, degrees.edp) == (4, 2)
    assert degrees.coordinates(5) == {"tp": 1, "cp": 0, "dp": 2, "pp": 0}
    assert degrees.coordinates(5, expert=True) == {"etp": 0, "ep": 1, "edp": 1, "pp": 0}
    flat = ParameterRule(sharding="flat")
    dense = rank_box(flat, (16, 2), rank=5, degrees=degrees)
    expert = rank_box(ParameterRule(expert=True, sharding="flat"), (8, 4), rank=5, degrees=degrees)
    assert dense is not None and expert is not None
    assert (dense.local_shape, dense.flattened_range) == ((16, 2), (16, 24))
    assert (expert.offset, expert.local_shape, expert.flattened_range) == ((2, 0), (2, 4), (4, 8))


def test_uneven_sizes_are_taken_as_given_and_checked() -> None:
    degrees = ParallelDegrees(world_size=3, ep=3)
    rule = ParameterRule(expert=True, ep_sizes=(5, 0, 2))
    boxes = [rank_box(rule, (7, 2), rank=rank, degrees=degrees) for rank in range(3)]
    assert [(b.offset[0], b.local_shape[0]) for b in boxes if b] == [(0, 5), (5, 0), (5, 2)]
    with pytest.raises(ValueError, match="do not add up to dim 0"):
        rank_box(rule, (8, 2), rank=0, degrees=degrees)
    with pytest.raises(ValueError, match=r"3 sizes .* for 2 ranks"):
        rank_box(rule, (7, 2), rank=0, degrees=ParallelDegrees(world_size=2, ep=2))
    with pytest.raises(ValueError, match="pp x etp x ep = 3 does not divide world_size=4"):
        ParallelDegrees(world_size=4, ep=3)
    with pytest.raises(ValueError, match=r"flat range .* cannot be cut"):
        Box.whole((4,)).flat_chunk(num=2, index=0).cut(0, begin=0, length=1)


def test_cuts_that_cannot_be_are_refused() -> None:
    whole = Box.whole((4, 6))
    flat = whole.flat_chunk(num=2, index=0)
    for cut, message in (
        (lambda: whole.chunk(2, num=2, index=0), r"dim 2 of a box of shape \(4, 6\)"),
        (lambda: whole.sizes(-1, sizes=[2, 4], index=0), r"dim -1 of a box"),
        (lambda: whole.sizes(1, sizes=[2, 4], index=2), r"part 2 of sizes \[2, 4\]"),
        (lambda: whole.sizes(1, sizes=[2, 3], index=0), "do not add up"),
        (lambda: flat.flat_chunk(num=2, index=1), r"flat range \(0, 12\) cannot be cut again"),
        (lambda: flat.chunk(0, num=2, index=1), "cannot be cut along"),
    ):
        with pytest.raises(ValueError, match=message):
            cut()
    rule, degrees = ParameterRule(tp_dim=1), ParallelDegrees(world_size=2, tp=2)
    with pytest.raises(ValueError, match=r"dim 1 of a box of shape \(4,\)"):
        rank_box(rule, (4,), rank=0, degrees=degrees)


def test_locally_numbered_experts_get_their_global_ids(tmp_path: Path) -> None:
    """Ranks 0 and 1 both call their experts 0 and 1; ids need not be contiguous."""
    ids = [[3, 0], [1, 2]]

    def fn(rank: int, world_size: int) -> None:
        local = {f"mlp.experts.{n}.up.weight": torch.full((2,), i) for n, i in enumerate(ids[rank])}
        fused = torch.tensor(ids[rank]).view(2, 1) * torch.ones(1, 3)
        parts = {
            "model": global_expert_keys({**local, "norm": torch.ones(1)}, ids[rank]),
            "optimizer": expert_shards("experts.{expert}/moment1", fused, ids[rank]),
        }
        save(parts, checkpoint_id=tmp_path / "c")

    run_ranks(fn, 2)
    for expert in range(4):
        weight, moment = torch.zeros(2, dtype=torch.int64), torch.zeros(3)
        load(
            {
                "model": {f"mlp.experts.{expert}.up.weight": weight},
                "optimizer": {f"experts.{expert}/moment1": moment},
            },
            checkpoint_id=tmp_path / "c",
        )
        assert weight.tolist() == [expert] * 2 and moment.tolist() == [expert] * 3
    with pytest.raises(ValueError, match=r"expert_ids \[7\]"):
        global_expert_keys({"experts.1.w": torch.ones(1)}, [7])


def plan_lines(num_ranks: int) -> int:
    """Lines that Python runs to plan 12 tensors: replicas, rows, grids, flat ranges, experts."""
    degrees = ParallelDegrees(world_size=num_ranks, tp=4, ep=8)
    rules = [
        ParameterRule(),
        ParameterRule(tp_dim=1, sharding="dim0"),
        ParameterRule(tp_dim=1, sharding="flat"),
        ParameterRule(expert=True, sharding="flat"),
    ]
    held: list[dict[str, list[BoxMeta]]] = []
    for rank in range(num_ranks):
        metas = []
        for number, rule in enumerate(rules * 3):
            box = rank_box(rule, (512, 96, 64), rank=rank, degrees=degrees)
            if box is not None:
                metas += [BoxMeta(f"w{number}", "F32", b) for b in box.unflattened()]
        held.append({"model": metas})
    lines = 0

    def count(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        plan_save(held)
    finally:
        sys.settrace(before)
    return lines


def test_planning_for_four_times_the_ranks_costs_about_four_times_as_much() -> None:
    small, large = plan_lines(128), plan_lines(512)
    assert large / small < 5, (small, large)  # quadratic cost would give 16
