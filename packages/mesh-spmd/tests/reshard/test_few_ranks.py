"""Plain numbers and columns: two ways to the same totals, tiles and plans."""

import math
import random

import torch
from torch.distributed.tensor import Placement, Replicate, Shard

from mesh_spmd import FlatSpec, ProcessMesh, Spec, TensorSpec
from mesh_spmd.reshard.cells import cells_of, shared
from mesh_spmd.reshard.few_ranks import totals_of
from mesh_spmd.reshard.moves import Link, Move, Side
from mesh_spmd.reshard.steps import make_step
from mesh_spmd.reshard.tilings import overlap, tiling_of


def random_spec(chance: random.Random, mesh: ProcessMesh, shape: tuple[int, ...]) -> Spec:
    """Any placements, any order, and one ragged axis where a dim has no other."""
    kinds: list[Placement] = [Replicate(), *map(Shard, range(len(shape)))]
    placements = [chance.choice(kinds) for _ in mesh.axis_names]
    order = chance.sample(mesh.axis_names, len(mesh.axis_names))
    sizes: dict[str, tuple[int, ...]] = {}
    for axis, placement in zip(mesh.axis_names, placements, strict=True):
        alone = isinstance(placement, Shard) and placements.count(placement) == 1
        if isinstance(placement, Shard) and alone and chance.random() < 0.5:
            bounds = sorted(chance.choices(range(shape[placement.dim] + 1), k=mesh.axis_size(axis)))
            bounds[-1] = shape[placement.dim]
            sizes[axis] = tuple(b - a for a, b in zip([0, *bounds], bounds, strict=False))
    return Spec(mesh, tuple(placements), tuple(order), sizes)


def random_mesh(chance: random.Random) -> ProcessMesh:
    shape = [chance.randint(1, 4) for _ in range(chance.randint(1, 3))]
    ranks = sorted(chance.sample(range(80), math.prod(shape)))
    return ProcessMesh(shape, tuple("abc")[: len(shape)], ranks)


def test_totals_in_plain_numbers_are_those_of_columns() -> None:
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    for _ in range(40):
        mesh = random_mesh(chance)
        shape = tuple(chance.randint(0, 9) for _ in range(chance.randint(0, 3)))
        zeros = (0,) * len(shape)
        sides = [
            Side(shape=shape, spec=random_spec(chance, mesh, shape), shift=zeros) for _ in range(2)
        ]
        link = Link(source=0, target=0)
        move = Move(link=link, source=sides[0], target=sides[1], addend=0, dtype=torch.float32)
        _, missing, due = move.totals()
        found = totals_of(sides[0].tiling, sides[1].tiling)
        assert found.missing == missing.tolist(), f"seed {seed}: {move}"
        assert found.due == due.tolist(), f"seed {seed}: {move}"
        assert found.holders == sides[0].cells.holders.tolist(), f"seed {seed}: {move}"
        specs = [TensorSpec(shape, torch.float32, side.spec) for side in sides]
        few = make_step(specs[:1], specs[1:], [link])
        # A second tensor, of nothing, makes it a list, which is planned in columns.
        nothing = TensorSpec((0,), torch.float32, Spec.from_axes(mesh, {}))
        links = [link, Link(source=1, target=1)]
        many = make_step([specs[0], nothing], [specs[1], nothing], links)
        assert (few.sent, few.received) == (many.sent, many.received), f"seed {seed}: {move}"
        assert few.rounds == many.rounds, f"seed {seed}: {move}"


def test_tiles_are_the_cells_and_share_what_cells_share() -> None:
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    for _ in range(40):
        shape = tuple(chance.randint(1, 6) for _ in range(chance.randint(1, 3)))
        tilings, cells = [], []
        for _ in range(2):
            mesh = random_mesh(chance)
            spec: Spec | FlatSpec = random_spec(chance, mesh, shape)
            free = [
                a for a, p in zip(mesh.axis_names, spec.placements, strict=True) if p.is_replicate()
            ]
            if free and chance.random() < 0.5:
                spec = FlatSpec(spec, tuple(free[:2]))
            shift = tuple(chance.randint(0, 2) for _ in shape)
            tilings.append(tiling_of(shape, spec, shift))
            cells.append(cells_of(shape, spec, shift))
        for position in range(tilings[0].mesh.size):
            tile = tilings[0].tile_at(position)
            assert tile.number == int(cells[0].cell[position]), f"seed {seed}"
            assert tilings[0].numbered(tile.number) == tile, f"seed {seed}"
            met = {found.number: found for found in tilings[1].meeting(tile)}
            both = shared(cells[0].pick(torch.tensor([position])), cells[1])
            for there in range(tilings[1].mesh.size):
                other = tilings[1].tile_at(there)
                found = met.get(other.number)
                count = int(both.numel[there])
                assert (found.end - found.begin if found else 0) == count, f"seed {seed}"
                assert overlap(tile, other) == found, f"seed {seed}"
                if found:
                    begin = int(both.begin[there])
                    assert (found.begin, found.end) == (begin, begin + count), f"seed {seed}"
