"""A small MoE training state between random pairs of layouts, bit for bit, and the bytes read.

Each pair saves under one layout and loads under another, on 1 to 4 real ranks each: tensor,
pipeline, expert, expert-tensor and data parallel, uneven experts, flat (stage 1) or row (stage 3)
sharding of moments, master weights and moving average. Every rank fills only its own boxes; each is
compared with the one state that all came from, experts and router biases by their global ids.
`benchmarks/unified_ckpt_layouts.py` runs the same code with large counts.
"""

import itertools
import random
import re
from dataclasses import replace
from pathlib import Path

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
    rank_box,
)
from unified_ckpt.plans import plan_save


class Scene:
    """One random state: parts by name, tensors whole, experts fused along dim 0."""

    def __init__(self, rng: random.Random, *, scale: int) -> None:
        self.num_layers = rng.choice([2, 3, 4])
        self.num_experts = rng.choice([4, 6, 8])
        hidden, inner = scale * rng.choice([3, 4, 5]), scale * rng.choice([2, 3, 7])
        generator = torch.Generator().manual_seed(rng.randrange(2**31))
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (rng.choice([11, 64]), hidden)
        }
        for layer in range(self.num_layers):
            base = f"model.layers.{layer}"
            shapes[f"{base}.self_attn.q_proj.weight"] = (hidden, inner)
            shapes[f"{base}.self_attn.o_proj.weight"] = (inner, hidden)
            shapes[f"{base}.input_layernorm.weight"] = (hidden,)
            shapes[f"{base}.mlp.gate.e_score_correction_bias"] = (self.num_experts,)
            shapes[f"{base}.mlp.experts"] = (self.num_experts, inner, hidden)
        self.shapes = shapes

        def draw(shape: tuple[int, ...]) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        masters = {key: draw(shape) for key, shape in shapes.items()}
        trained = [key for key in shapes if not key.endswith("bias")]
        self.parts: dict[str, dict[str, torch.Tensor]] = {
            "model": {k: t if k.endswith("bias") else t.bfloat16() for k, t in masters.items()},
            "master_weights": {k: masters[k] for k in trained},
            "ema": {k: draw(shapes[k]).bfloat16() for k in trained},
            "optimizer": {
                **{f"{k}/moment1": draw(shapes[k]) for k in trained},
                **{f"{k}/moment2": draw(shapes[k]).square() for k in trained},
            },
        }


class Arrangement:
    """One random way to divide a scene over ranks."""

    def __init__(self, rng: random.Random, scene: Scene) -> None:
        world = rng.choice([1, 2, 3, 4])
        pp = rng.choice([n for n in (1, 2) if world % n == 0])
        stage = world // pp
        tp = rng.choice([n for n in range(1, stage + 1) if stage % n == 0])
        cp = rng.choice([n for n in range(1, stage // tp + 1) if (stage // tp) % n == 0])
        ep = rng.choice([n for n in range(1, stage + 1) if stage % n == 0])
        etp = rng.choice([n for n in range(1, stage // ep + 1) if (stage // ep) % n == 0])
        self.degrees = ParallelDegrees(world_size=world, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp)
        self.stage_sharding = rng.choice(["none", "flat", "dim0", "owner"])
        self.shards_model = self.stage_sharding == "dim0" and rng.random() < 0.5
        self.split = sorted(rng.sample(range(1, scene.num_layers), pp - 1))
        # Uneven experts: any cut of the experts into ep parts, empty ones included.
        cuts = sorted(rng.randint(0, scene.num_experts) for _ in range(ep - 1))
        ends = [0, *cuts, scene.num_experts]
        self.ep_sizes = tuple(b - a for a, b in itertools.pairwise(ends))
        self.owner = rng.randrange(8)

    def shards(self, scene: Scene, rank: int, part: str, *, copy: bool) -> list[Shard]:
        """Return what a rank holds of a part; `copy` fills memory of its own, else zeros."""
        held: list[Shard] = []
        for key, whole in scene.parts[part].items():
            rule = self._rule(key.partition("/")[0], part)
            box = rank_box(rule, tuple(whole.shape), rank=rank, degrees=self.degrees)
            if box is not None:
                held += _stored(key, box, whole, copy=copy)
        return held

    def _rule(self, parameter: str, part: str) -> ParameterRule:
        stage = None
        if ".layers." in parameter:
            layer = int(parameter.split(".layers.")[1].split(".")[0])
            stage = sum(layer >= cut for cut in self.split)
        elif self.degrees.pp > 1:
            stage = 0
        rule = ParameterRule(pp_stage=stage, owner=self.owner)
        if parameter.endswith("experts"):
            rule = replace(rule, expert=True, ep_sizes=self.ep_sizes, tp_dim=1)
        elif parameter.endswith(("q_proj.weight", "embed_tokens.weight")):
            rule = replace(rule, tp_dim=0)
        elif parameter.endswith("o_proj.weight"):
            rule = replace(rule, tp_dim=1)
        if parameter.endswith("bias") or (part == "model" and not self.shards_model):
            return rule
        return replace(rule, sharding=self.stage_sharding)


def _stored(key: str, box: Box, whole: torch.Tensor, *, copy: bool) -> list[Shard]:
    """One stored tensor; of fused experts one per expert, by global id."""
    window = whole[tuple(slice(o, o + n) for o, n in zip(box.offset, box.local_shape, strict=True))]
    if not key.partition("/")[0].endswith("mlp.experts"):
        memory = (
            window
            if box.flattened_range is None
            else window.reshape(-1)[slice(*box.flattened_range)]
        )
        return [
            Shard(key=key, tensor=memory.clone() if copy else torch.zeros_like(memory), box=box)
        ]
    parameter, slash, state = key.partition("/")
    name = parameter.replace(".mlp.experts", ".mlp.experts.{expert}.up_proj.weight") + slash + state
    fused = window.clone() if copy else torch.zeros_like(window)
    first = box.offset[0]
    if box.flattened_range is None and box.local_shape == (box.local_shape[0], *whole.shape[1:]):
        return expert_shards(name, fused, range(first, first + box.local_shape[0]))
    return list(_expert_parts(name, box, fused))


def _expert_parts(name: str, box: Box, fused: torch.Tensor) -> list[Shard]:
    """Boxes of experts that etp or a flat range cuts, each expert with its own part of it."""
    inner = fused[0].numel() if len(fused) else 0
    begin, end = box.flattened_range or (0, fused.numel())
    held = []
    for local in range(len(fused)):
        low, high = max(begin - local * inner, 0), min(end - local * inner, inner)
        if low >= high:
            continue
        held.append(
            Shard(
                key=name.format(expert=box.offset[0] + local),
                tensor=fused[local].reshape(-1)[low:high],
                box=Box(box.global_shape[1:], box.offset[1:], box.local_shape[1:], (low, high)),
            )
        )
    return held


def run_pair(seed: int, folder: Path, *, scale: int) -> float:
    """Save and load one pair; return the worst rank's bytes read over its unique bytes.

    Raises:
        ValueError: a loaded tensor differs from the state.
    """
    rng = random.Random(seed)
    scene = Scene(rng, scale=scale)
    before, after = Arrangement(rng, scene), Arrangement(rng, scene)

    def saves(rank: int, world_size: int) -> None:
        parts = {part: before.shards(scene, rank, part, copy=True) for part in scene.parts}
        save(parts, checkpoint_id=folder)

    def loads(rank: int, world_size: int) -> float:
        wants = {part: after.shards(scene, rank, part, copy=False) for part in scene.parts}
        report = load(wants, checkpoint_id=folder)
        expected = {part: after.shards(scene, rank, part, copy=True) for part in scene.parts}
        needed = 0
        for part, shards in wants.items():
            for want, truth in zip(shards, expected[part], strict=True):
                needed += want.tensor.numel() * want.tensor.element_size()
                if not torch.equal(want.tensor, truth.tensor):
                    raise ValueError(f"seed {seed}: {part} {want.key} on rank {rank} differs")
        return report.num_bytes / needed if needed else 1.0

    run_ranks(saves, before.degrees.world_size)
    problems = verify_checkpoint(folder).problems
    if problems:
        raise ValueError(f"seed {seed}: {problems}")
    return max(run_ranks(loads, after.degrees.world_size))


def test_random_pairs_of_moe_layouts_are_bit_exact_and_read_what_they_need(tmp_path: Path) -> None:
    for number in range(3):
        seed = random.randrange(2**32)
        print(f"seed {seed}")
        assert run_pair(seed, tmp_path / f"checkpoint-{number}", scale=4) <= 1.02, seed


def spoil(rng: random.Random, held: list[dict[str, list[BoxMeta]]]) -> str | None:
    """Make one mistake in who holds what; return the key, None where it would be none."""
    rank, part = rng.randrange(len(held)), rng.choice(["model", "optimizer", "master_weights"])
    metas = [meta for meta in held[rank][part] if meta.box.numel]
    if not metas:
        return None
    meta = rng.choice(metas)
    key, box = meta.key, meta.box
    number = next(i for i, m in enumerate(held[rank][part]) if m is meta)
    kind = rng.choice(["drop", "shift", "shrink", "dtype", "shape"])
    dim = rng.randrange(len(box.local_shape))
    others = sum(m.key == key for metas in held for m in metas[part]) - 1
    changed = None
    if kind == "drop":
        for held_by in held:
            held_by[part] = [m for m in held_by[part] if m.key != key or m.box != box]
        known = any(key == m.key for h in held for m in h[part])
        return key if known else None  # the only box is gone: nobody knows of the tensor
    if kind == "shift" and box.offset[dim] + box.local_shape[dim] < box.global_shape[dim]:
        changed = replace(box, offset=tuple(o + (d == dim) for d, o in enumerate(box.offset)))
    elif kind == "shrink" and box.local_shape[dim] > 1:
        shape = tuple(n - (d == dim) for d, n in enumerate(box.local_shape))
        changed = replace(box, local_shape=shape)
    elif kind == "shape":
        changed = replace(box, global_shape=(box.global_shape[0] + 1, *box.global_shape[1:]))
    elif kind == "dtype" and others:
        held[rank][part][number] = replace(meta, dtype="F64")
        return key
    if changed is None:
        return None
    held[rank][part][number] = replace(meta, box=changed)
    return key


def test_every_hole_overlap_and_mismatch_raises_with_the_key() -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    scene = Scene(rng, scale=2)
    found = 0
    while found < 60:
        arrangement = Arrangement(rng, scene)
        held = [
            {
                part: [
                    plain.meta
                    for shard in arrangement.shards(scene, rank, part, copy=False)
                    for plain in shard.boxes()
                ]
                for part in scene.parts
            }
            for rank in range(arrangement.degrees.world_size)
        ]
        key = spoil(rng, held)
        if key is None:
            continue
        with pytest.raises(ValueError, match=re.escape(repr(key))):
            plan_save(held)
        found += 1
