import random

import pytest
import torch
from torch.distributed.tensor import Placement, Replicate, Shard

from mesh_spmd import MeshValueError, ProcessMesh, Spec, TensorSpec
from mesh_spmd.creation import infer_tensor_spec

MESH = ProcessMesh((2, 3), ("dp", "ep"))


def test_the_whole_is_found_from_the_shapes_of_its_parts() -> None:
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    for _ in range(50):
        kinds: list[Placement] = [Replicate(), Shard(0), Shard(1)]
        placements = (chance.choice(kinds), chance.choice(kinds))
        shape = (chance.randint(0, 9), chance.randint(0, 9))
        sizes = {}
        if placements[1] == Shard(0) and placements[0] != Shard(0):
            cut = sorted(chance.randint(0, shape[0]) for _ in range(2))
            sizes["ep"] = (cut[0], cut[1] - cut[0], shape[0] - cut[1])
        tensor = TensorSpec(shape, torch.float32, Spec(MESH, placements, (), sizes))
        shapes = {rank: tensor.local_shape(rank) for rank in MESH.ranks}
        found = infer_tensor_spec(shapes, torch.float32, MESH, placements)
        assert found.shape == shape, f"seed {seed}"
        assert [found.box(r) for r in MESH.ranks] == [tensor.box(r) for r in MESH.ranks]


def test_a_wrong_local_shape_is_named_with_rank_and_expected_box() -> None:
    shapes = {rank: (2, 4) for rank in MESH.ranks}
    placements = (Replicate(), Shard(0))
    with pytest.raises(MeshValueError, match=r"rank 4 has .* \(3, 4\); .* it must be \(2, 4\)"):
        infer_tensor_spec(shapes | {4: (3, 4)}, torch.float32, MESH, placements)
    with pytest.raises(MeshValueError, match=r"rank 5 has .* \(2,\); .* it must be \(2, 4\)"):
        infer_tensor_spec(shapes | {5: (2,)}, torch.float32, MESH, placements)
    with pytest.raises(MeshValueError, match=r"ranks \[5\] .* have no local shape"):
        infer_tensor_spec(
            {r: s for r, s in shapes.items() if r < 5}, torch.float32, MESH, placements
        )
